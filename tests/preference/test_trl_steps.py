"""Ten steps of TRL's trainer and of ours on the same pairs in the same order."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, batch_of, pairs
from tiny import llama
from torch import Tensor
from torch.utils.data import SequentialSampler

from forgather_cli.errors import ModelError
from forgather_cli.models.build import build_model, directory_option, initialize
from forgather_cli.trainer.arguments import TrainingArguments
from forgather_cli.trainer.script import Trainer

STEPS, BATCH = 10, 4


class Rows:
    """One pair a row, as a user's dataset gives them."""

    def __init__(self, some: Sequence[Pair]) -> None:
        self.pairs, self.num_pairs, self.max_pairs = some, len(some), 1

    def __len__(self) -> int:
        return len(self.pairs)

    def row_pairs(self, row: int) -> range:
        return range(row, row + 1)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {key: value[0] for key, value in self.__getitems__([row]).items()}

    def __getitems__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        batch = batch_of([self.pairs[row] for row in rows], 1)
        return {key: value for key, value in batch.items() if key != "for_loss_reference"}


def theirs(model: Any, some: Sequence[Pair], directory: Path, loss: str) -> list[dict[str, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import DPOConfig, DPOTrainer

        class InOrder(DPOTrainer):
            def _get_train_sampler(self, dataset: Any = None) -> Any:
                return SequentialSampler(self.train_dataset)

            def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
                return dataset

        words = Tokenizer(models.WordLevel({str(n): n for n in range(64)}, unk_token="0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
        rows = [{"prompt_ids": p.prompt, "chosen_ids": p.chosen, "rejected_ids": p.rejected} for p in some]
        config = DPOConfig(
            output_dir=str(directory), bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none",
            max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3, lr_scheduler_type="constant",
            weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, save_strategy="no", loss_type=[loss], seed=1,
            disable_tqdm=True, optim="adamw_torch",
        )  # fmt: skip
        trainer = InOrder(
            model,
            copy.deepcopy(model),
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_ten_steps_are_those_of_trls_trainer(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, some = llama(), pairs(STEPS * BATCH)
    model.save_pretrained(tmp_path / "model")
    option = directory_option(tmp_path / "model")
    own = build_model(option, vocab_size=64, seq_len=64)
    initialize(option, own, 0)
    ours = Trainer(
        model=own,
        args=TrainingArguments(
            output_dir=str(tmp_path / "ours"), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3,
            lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
            train_sampling_strategy="sequential", loss={"type": "dpo", "variant": loss}, use_cpu=True,
        ),
        train_dataset=Rows(some),
    )  # fmt: skip
    ours.train()
    told = theirs(model, some, tmp_path / "theirs", loss)
    found = [json.loads(line) for line in Path(tmp_path, "ours", "metrics.jsonl").read_text().splitlines()]
    found = [line for line in found if "loss" in line]
    assert len(found) == len(told) == STEPS
    for mine, line in zip(found, told, strict=True):
        assert mine["loss"] == pytest.approx(line["loss"], rel=1e-5), mine["step"]
        assert mine["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4), mine["step"]
        for name in ("rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"):
            assert mine[name] == pytest.approx(line[name], rel=1e-4, abs=1e-5), (name, mine["step"])


def test_a_class_of_transformers_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops ``document_ids``, and each side would see the one before it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=BATCH, loss={"type": "dpo"},
        use_cpu=True,
    )  # fmt: skip
    with pytest.raises(ModelError, match="isolate_documents: LlamaForCausalLM of transformers"):
        Trainer(model=llama(), args=arguments, train_dataset=Rows(pairs(BATCH))).train()
