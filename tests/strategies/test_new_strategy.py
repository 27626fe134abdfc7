"""A strategy of the user's: one file with the four verbs, one YAML with ``_target_``, no change to the program."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from program import Process, forgather, refusal, write
from tiny import training_curve

STRATEGY = '''
"""One device; gradients of a step are those of its sequences one after the other."""

import torch

from forgather_cli.labels import num_targets
from forgather_cli.loss.model_io import model_kwargs, model_logits
from forgather_cli.strategies.base import Strategy


class OneByOne(Strategy):
    name = "one_by_one"
    data_rank, data_size, model_group = 0, 1, None

    def __init__(self, device, loss, autocast, rows=1):
        self.device, self._loss, self._rows = device, loss, rows

    def materialize(self, spec):
        model = spec.transformed(spec.whole())
        spec.fill(model, self.device)
        self.parts = [model]

    def forward_backward(self, microbatches, step_targets):
        share = torch.zeros((), device=self.device)
        for batch in microbatches:
            for n in range(0, len(batch["input_ids"]), self._rows):
                part = {key: value[n : n + self._rows] for key, value in batch.items()}
                loss = self._total(part, step_targets) / step_targets
                loss.backward()
                share += loss.detach()
        return share

    def _total(self, batch, step_targets=None):
        return self._loss.total(self.parts[0], model_kwargs(batch), batch["labels"], step_targets)

    @torch.no_grad()
    def loss(self, batch):
        return self._total(batch), num_targets(batch["labels"])

    @torch.no_grad()
    def logits(self, batch, *, last_only=False, cache=None):
        return model_logits(self.parts[0], model_kwargs(batch), last_only=last_only, cache=cache)
'''
OPTION = """# Mine: one sequence after the other.
_target_: mine_strategy.OneByOne
rows: 2
"""
RUN = ["model=nano", "precision=fp32",
       "hidden_size=32", "data=synthetic", "seq_len=16", "ragged=true", "global_batch_size=8",
       "max_steps=2", "logging_steps=1", "eval_steps=2", "num_eval_samples=8", "callbacks=minimal",
       "save_steps=1"]  # fmt: skip


def test_a_strategy_of_the_users_has_its_settings_checked_trains_saves_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    write("mine_strategy.py", STRATEGY)
    write("settings/trainer/mine.yaml", OPTION)
    mine = ["--config-dir", "settings", "trainer=mine", "output_dir=mine"]
    with Process("train", *RUN, *mine, "+trainer.colour=red") as process:
        assert process.finish() == 2
    assert "colour" in process.output
    assert not Path("mine").exists()
    with Process("train", *RUN, *mine) as process:
        assert process.finish() == 0, process.output
    assert forgather("train", *RUN, "output_dir=single") == 0
    ours, reference = training_curve("mine"), training_curve("single")
    assert [step for step, *_ in ours] == [1, 2]
    for (_, *found), (_, *expected) in zip(ours, reference, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    manifest = json.loads(Path("mine/checkpoints/step-00000002/manifest.json").read_text())
    assert manifest["strategy"] == "one_by_one"
    assert forgather("resume", "mine", "trainer=single", "max_steps=3") == 0
    assert [step for step, *_ in training_curve("mine")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["torch_compile=true"], "torch_compile"),
        (["precision=fp16"], "precision"),
        (["fuse_optim_with_backward=true", "max_grad_norm=null", "optimizer=adamw"], "fuse_optim_with_backward"),
    ],
    ids=["compile", "fp16", "optimizer in backward"],
)
def test_what_it_does_not_state_on_itself_it_does_not_support(
    words: list[str], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write("mine_strategy.py", STRATEGY)
    monkeypatch.delitem(sys.modules, "mine_strategy", raising=False)
    mine = ["trainer._target_=mine_strategy.OneByOne", "output_dir=mine"]
    assert f"{names}: the strategy one_by_one can" in refusal(capsys, "train", *RUN, *mine, *words)
