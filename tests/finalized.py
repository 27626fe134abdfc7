"""Small runs to finalize, average and edit, and models that transformers loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from program import forgather
from tiny import config, decoder
from torch import Tensor, nn

from forgather_cli.checkpoint.tensors import write_model_directory
from forgather_cli.config.decode import dump_tree, to_tree
from forgather_cli.config.schema import Target
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.documents.regular_files import write_whole
from forgather_cli.models.pretrained import write_model_files
from forgather_cli.run_dir import RunDir

IDS = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(0))


class Bigrams(nn.Module):
    """A model of the user's own."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


def memorize(model: nn.Module, text: str, steps: int = 40, lr: float = 1e-2) -> nn.Module:
    """Train on one text until it is known by heart."""
    ids = torch.tensor([list(text.encode())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        scores = model(ids)
        nn.functional.cross_entropy(getattr(scores, "logits", scores)[0, :-1], ids[0, 1:]).backward()
        optimizer.step()
    return model


def train(path: Path, *overrides: str, model: Target | None = None) -> Path:
    """Collective. In ``path`` a run of 6 steps, saved and evaluated every 2, with its config.yaml."""
    settings = ["max_steps=6", "save_steps=2", "eval_steps=2", "learning_rate=1e-2", "warmup_steps=1", "device=cpu"]
    made = config(path, *settings, "async_save=false", "callbacks.progress=null", *overrides)
    made = made if model is None else replace(made, model=model)
    path.mkdir(parents=True, exist_ok=True)
    write_whole(RunDir(path).config, dump_tree(to_tree(made)))  # each rank does, and reads it
    tiny.train(made, RunDir(path))
    return path


def theirs(directory: Path, **settings: Any) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, **settings).eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    out = model(ids)
    return getattr(out, "logits", out)


def weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a model directory, read by the safetensors library."""
    from safetensors.torch import load_file

    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def model_directory(path: Path, **settings: Any) -> Path:
    """A Hugging Face directory with a byte tokenizer."""
    model = decoder(vocab_size=257, **settings)
    path.mkdir()
    tied = settings.get("tie_word_embeddings", False)
    tensors = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    write_model_directory(path, tensors)
    write_model_files(model, ByteTokenizer(), path)
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """One message, and nothing left behind."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()  # transformers' bars, of models that it wrote
    assert forgather("finalize", *words) == code
    message = capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before
    assert "Traceback" not in message
    return message
