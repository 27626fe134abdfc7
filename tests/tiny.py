"""Small models, data and settings that tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config, DecoderSettings
from forgather_cli.launch.context import RankContext
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import init_parameters
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.script import Trainer
from forgather_cli.worker import build

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def decoder_settings(**changes: Any) -> DecoderSettings:
    """2 layers and a vocabulary of 64, resolved."""
    shape = {
        **SHAPE,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **changes,
    }
    return DecoderSettings(**shape)


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    """A 2-layer decoder with a vocabulary of 64 and weights drawn by (seed, name)."""
    model = Decoder(decoder_settings(**changes))
    init_parameters(model, seed)
    return model


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Map-style samples of 16 random tokens; ``ragged`` leaves a random tail of each without targets."""

    def __init__(self, length: int = 64, seed: int = 0, ragged: bool = False, vocab: int = 64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, vocab, (length, 16), generator=generator)
        self.lengths = torch.randint(4, 17, (length,), generator=generator) if ragged else torch.full((length,), 16)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def config(output_dir: Path, *overrides: str, callbacks: str = "minimal") -> Config:
    """The default recipe on a nano model and synthetic data, with AdamW, and overrides."""
    base = [
        "model=nano", "precision=fp32", "optimizer=adamw", "learning_rate=2e-3",
        "data=synthetic", "data.seq_len=16", "data.num_samples=256", "data.num_eval_samples=8",
        f"callbacks={callbacks}", f"output_dir={output_dir}", "global_batch_size=8", "max_steps=4",
    ]  # fmt: skip
    return load_config(None, [*base, *overrides]).config


def train(settings: Config, run_dir: RunDir, rank: RankContext | None = None) -> Trainer:
    """The Trainer that a rank makes, as training left it."""
    trainer = build(settings, run_dir, rank=rank)
    trainer.train()
    return trainer


def metrics(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """All records of a run's file."""
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def tensorboard(folder: Path) -> Any:
    """What TensorBoard's own reader finds there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def training_curve(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each training record."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in metrics(run) if "grad_norm" in r]
