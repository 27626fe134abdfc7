"""Small models, data and settings that tests share."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config, DecoderSettings
from forgather_cli.launch.context import RankContext
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import init_parameters
from forgather_cli.models.pretrained import write_model_files
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import Batch, Strategy
from forgather_cli.trainer.arguments import TrainingArguments
from forgather_cli.trainer.script import Trainer
from forgather_cli.worker import build

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def decoder_settings(**changes: Any) -> DecoderSettings:
    """2 layers and a vocabulary of 64, resolved."""
    shape = {**SHAPE, "vocab_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 16}
    return DecoderSettings(**{**shape, **changes})


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    """A 2-layer decoder with a vocabulary of 64 and weights drawn by (seed, name)."""
    model = Decoder(decoder_settings(**changes))
    init_parameters(model, seed)
    return model


def pretrained(directory: Path, model: Decoder) -> Path:
    """A model directory with these weights."""
    write_model_files(model, None, directory)
    save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, directory / "model.safetensors")
    return directory


def llama(**changes: Any) -> Any:
    """One of transformers, of the same shape, with weights drawn by seed 0."""
    import transformers

    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": 64, "max_position_embeddings": 64, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def token_batch() -> dict[str, Tensor]:
    """Four sequences of 16 tokens, all of them targets but the first ones."""
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


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


def stream(data: Any) -> IterableDataset[Any]:
    """The samples in order, of an unknown number."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (data[n] for n in range(len(data)))

    return Stream()


def acts(**events: Callable[..., Any]) -> TrainerCallback:
    """A callback whose events are these functions of (state, control) and the rest by name."""

    def method(act: Callable[..., Any]) -> Callable[..., None]:
        def event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            act(state, control, **kwargs)

        return event

    return type("Acts", (TrainerCallback,), {name: method(act) for name, act in events.items()})()


def note_batches(strategy: Strategy) -> list[list[Batch]]:
    """The micro-batches of each step from now on, as they are taken."""
    steps: list[list[Batch]] = []
    plain = strategy.forward_backward

    def noting(microbatches: Any, step_targets: Tensor) -> Tensor:
        steps.append([])
        return plain(Noted(microbatches, steps[-1]), step_targets)

    strategy.forward_backward = noting  # type: ignore[method-assign]
    return steps


class Noted:
    """Micro-batches of a step, which are appended to ``into`` as they are taken."""

    def __init__(self, microbatches: Any, into: list[Batch]) -> None:
        self._microbatches, self._into = microbatches, into

    def __len__(self) -> int:
        return len(self._microbatches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._microbatches:
            self._into.append(batch)
            yield batch


def script(
    path: Path | str, model: Any = None, data: Any = None, evaluated: Any = None, *, kind: Any = Trainer, **given: Any
) -> Trainer:
    """A script's Trainer, by default of a decoder on random tokens that saves nothing; ``given`` are arguments of
    TrainingArguments and of Trainer."""
    own = {name: given.pop(name) for name in [*given] if name in inspect.signature(Trainer).parameters}
    quiet = {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    args = TrainingArguments(str(path), **{**quiet, **given})
    model = model if model is not None or "model_init" in own else decoder()
    data = RandomTokens() if data is None else data
    return kind(model, args, train_dataset=data, eval_dataset=evaluated, **own)


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


def metrics(run: Path | str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, file).read_text().splitlines()]


def tensorboard(folder: Path) -> Any:
    """What TensorBoard's own reader finds there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def training_curve(run: Path | str) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each training record."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in metrics(run) if "grad_norm" in r]
