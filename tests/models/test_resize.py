"""Rows for new tokens, alike under every strategy; fine-tuning of models whose embedding and head are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_model
from hf_models import assert_as_by_hand, load_theirs, newest_model, train
from parity import LAYOUTS, Result, assert_near, assert_parity, checkpoint_tensors
from torch import Tensor

from forgather_cli.config.schema import PretrainedSettings, TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.inference.source import load_source
from forgather_cli.models.build import build_model, initialize
from forgather_cli.models.init import allocate
from forgather_cli.models.resize import NOISE, grown_vocabulary, new_rows
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
OLD, TOKENS, NEW = 250, 257, 264  # rows of the model, tokens of data.tokenizer=bytes, a multiple of 8
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_new_rows_stand_at_the_mean_and_apart() -> None:
    weight = torch.randn(9000, 16, generator=torch.Generator().manual_seed(0)) * 3 + 5
    rows = new_rows(weight, 400, name="a", seed=1)
    torch.testing.assert_close(rows.mean(0), weight.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(rows.std(0), NOISE * weight.std(0), rtol=0.2, atol=0)
    assert rows.equal(new_rows(weight, 400, name="a", seed=1))
    assert not rows.equal(new_rows(weight, 400, name="b", seed=1))
    assert not rows.equal(new_rows(weight, 400, name="a", seed=2))
    assert new_rows(ones := torch.ones(5, 4, dtype=torch.bfloat16), 2).equal(ones[:2])
    assert new_rows(torch.arange(5.0), 3).shape == (3,)


@pytest.mark.parametrize(("rows", "multiple", "expected"), [(250, None, 257), (250, 64, 320), (300, None, 300)])
def test_a_vocabulary_grows_and_never_shrinks(rows: int, multiple: int | None, expected: int) -> None:
    option = PretrainedSettings(path="x", resize_vocabulary=True, pad_vocab_to_multiple_of=multiple)
    assert grown_vocabulary(option, rows, tokens=TOKENS) == expected


def test_without_being_told_to_a_model_is_not_resized(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", OLD)
    for option in (PretrainedSettings(path=str(tmp_path)), TransformersSettings(path=str(tmp_path))):
        with pytest.raises(ModelError, match=r"data\.tokenizer: has 257 tokens, .* only 250; set model\.resize_vocab"):
            build_model(option, vocab_size=TOKENS, seq_len=16)


def grown(path: Path) -> list[str]:
    return [
        "model=pretrained",
        f"model.path={path}",
        "data.tokenizer=bytes",
        "resize_vocabulary=true",
        "pad_vocab_to_multiple_of=8",
    ]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds = {"tied": {"tie_word_embeddings": True, "num_hidden_layers": 4}, "untied": {}}
    for name, settings in kinds.items():
        write_model(folder / name, "llama", OLD, **settings)
    return {name: folder / name for name in kinds}


@pytest.fixture(scope="module")
def runs(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: train(LAYOUTS["single"], grown(path), folder / name) for name, path in directories.items()}


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_old_rows_are_kept_and_new_ones_added(kind: str, directories: dict[str, Path], runs: dict[str, Result]) -> None:
    stored: dict[str, Tensor] = load_theirs(directories[kind]).state_dict()
    for name in {"tied": [EMBEDDING], "untied": [EMBEDDING, HEAD]}[kind]:
        rows = runs[kind].begin[name]
        assert rows[:OLD].equal(stored[name])
        assert rows[OLD:].equal(new_rows(stored[name], NEW - OLD, name=name, seed=42))
    assert (HEAD in runs[kind].begin) is (kind == "untied")


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_it_trains_as_a_plain_loop_does_and_transformers_loads_it(kind: str, runs: dict[str, Result]) -> None:
    run, ids = runs[kind], torch.arange(30, 46)[None]
    assert_as_by_hand(run, ids, trains_padding=True)
    ends = load_theirs(newest_model(run.path))
    assert ends.config.vocab_size == NEW
    torch.testing.assert_close(load_source(run.path, device="cpu").model(ids), ends(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("tied", "ddp 2"), ("tied", "ZBVZeroBubble 2"), ("untied", "fsdp2 2")],
)
def test_every_strategy_begins_and_learns_alike(
    kind: str, layout: str, directories: dict[str, Path], runs: dict[str, Result], tmp_path: Path
) -> None:
    found = train(LAYOUTS[layout], grown(directories[kind]), tmp_path)
    for name, rows in runs[kind].begin.items():
        assert torch.equal(found.begin[name], rows), name
    assert_parity(found, runs[kind])


def test_a_resized_tied_model_goes_on_in_other_layouts(
    directories: dict[str, Path], runs: dict[str, Result], tmp_path: Path
) -> None:
    stop = ["+callbacks.probe.stop_after=1"]
    train(LAYOUTS["1F1B 2"], grown(directories["tied"]), tmp_path, stop)
    assert [name for name in checkpoint_tensors(RunDir(tmp_path)) if name in (EMBEDDING, HEAD)] == [EMBEDDING]
    train(LAYOUTS["fsdp2 2"], grown(directories["tied"]), tmp_path, ["+callbacks.probe.stop_after=2"], resume=True)
    found = train(LAYOUTS["single"], grown(directories["tied"]), tmp_path, resume=True)
    assert_near(found.losses, runs["tied"].losses, "loss")


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_model_of_transformers_grows_too(model_type: str, tmp_path: Path) -> None:
    settings = {"num_local_experts": 4} if model_type == "mixtral" else {"tie_word_embeddings": True}
    stored = write_model(tmp_path, model_type, OLD, **settings)
    option = TransformersSettings(path=str(tmp_path), resize_vocabulary=True, pad_vocab_to_multiple_of=8)
    with torch.device("meta"):
        model: Any = build_model(option, vocab_size=TOKENS, seq_len=16)
    allocate(model, "cpu")
    initialize(option, model, 42)
    rows = model.get_parameter(EMBEDDING)
    assert rows[:OLD].equal(stored.get_parameter(EMBEDDING))
    assert rows[OLD:].equal(new_rows(stored.get_parameter(EMBEDDING), NEW - OLD, name=EMBEDDING, seed=42))
    assert model.vocab_size == model.config.vocab_size == NEW
    ids = torch.arange(30, 46)[None]
    torch.testing.assert_close(model(ids)[..., :OLD], stored(ids).logits)
