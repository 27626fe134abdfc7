"""What holds of every option of the group ``model``, shipped or in a folder of its own (``model_rows.py``)."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from model_rows import MODELS, ModelRow
from program import document
from ranks import run_ranks

from forgather_cli.config.explain import explain
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import ModelSettings
from forgather_cli.models.build import build_model, fill
from forgather_cli.models.init import allocate
from forgather_cli.run_dir import RunDir

TYPES = [option.type for option in ModelSettings.members]


@pytest.fixture(params=TYPES)
def row(request: pytest.FixtureRequest, own_directory: None) -> ModelRow:
    assert request.param in MODELS, f"model={request.param}: no row of tests/models/model_rows.py knows it; add one"
    found = MODELS[request.param]
    found.prepare()
    chosen: Any = load_config(None, found.words).config.model
    assert chosen.type == request.param
    return found


def test_it_computes_what_it_says_and_plan_counts_it(row: ModelRow, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(None, row.words).config
    with torch.device("meta"):
        model = build_model(config.model, vocab_size=257, seq_len=16)
    allocate(model, "cpu")
    fill(config, torch.device("cpu"), model, 0)
    ids = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "decoder_input_ids": ids[:, 3:]} if config.data.is_paired else {"input_ids": ids}
    row.check(model.eval(), batch)
    planned = document(capsys, "plan", *row.words, "max_steps=4")
    with torch.device("meta"):
        model = build_model(config.model, vocab_size=planned["vocab_size"], seq_len=16)
    assert planned["num_parameters"] == sum(each.numel() for each in model.parameters())
    assert planned["memory_bytes"] > 0


def trained(folder: str, *words: str) -> None:
    os.chdir(folder)
    config: Any = load_config(None, [*words, "optimizer=adamw", "lr_scheduler=constant", "save_steps=2"]).config
    tiny.train(config, RunDir(Path(config.output_dir)))


def test_two_ranks_that_resume_train_as_one(row: ModelRow) -> None:
    here, ranks = str(Path.cwd()), [*row.words, "output_dir=ranks", "trainer=fsdp2"]
    trained(here, *row.words, "output_dir=alone", "max_steps=4")
    run_ranks(2, trained, here, *ranks, "max_steps=2")
    run_ranks(2, trained, here, *ranks, "max_steps=4", "resume_from_checkpoint=true")
    resumed = tiny.training_curve("ranks")
    assert [step for step, *_ in resumed] == [1, 2, 3, 4]
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(tiny.training_curve("alone")), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", ModelSettings.members, ids=TYPES)
def test_its_settings_are_explained_and_its_maker_takes_them(option: type[ModelSettings]) -> None:
    for field in fields(option):  # type: ignore[arg-type]
        if field.name != "type":
            found: Any = explain(f"model.{field.name}")[0]
            assert f"model={option.type}" in found.values
    needed = {"path": "x"} if option.type == "pretrained" else {}
    made = option(**needed)
    inspect.signature(made.load_maker()).bind_partial(**made.arguments())
    assert not option.directory_setting or option.directory_setting in {field.name for field in fields(option)}  # type: ignore[arg-type]
