"""A small training state whose whole content follows from the step, and a run that saves it."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather_cli.checkpoint.components import Component, LocalShard, Sharing
from forgather_cli.checkpoint.load import Reader, newest_valid
from forgather_cli.checkpoint.save import Checkpointer
from forgather_cli.config.schema import RunSettings
from forgather_cli.distributed import cpu_group, world
from forgather_cli.run_dir import RunDir


class Box:
    """A component: holds a state and gives it back."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def tensors(step: int, size: int = 64) -> dict[str, Tensor]:
    """Weights of every shape and several dtypes."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.embed.weight": torch.randn(size, 16, generator=generator),
        "model.layers.0.weight": torch.randn(size, size, generator=generator).bfloat16(),
        "model.layers.10.bias": torch.full((7,), float(step), dtype=torch.float64),
        "model.scale": torch.tensor(float(step)),
        "model.empty": torch.zeros(0, 3, dtype=torch.float16),
        "model.ids": torch.arange(step, step + 5),
        "model.mask": torch.tensor([True, False, True]),
    }


def moments(step: int, size: int = 64) -> dict[str, Tensor]:
    weights = tensors(step, size)
    floating = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
    return {f"{name}.exp_avg": tensor.float() / 2 for name, tensor in floating.items()}


def components(step: int) -> list[Component]:
    return [
        Component("trainer", Box({"step": step, "history": (1.5, float("inf"))}), Sharing.GLOBAL, required=True),
        Component("scheduler", Box({"last_lr": [0.1]}), Sharing.REPLICATED),
        Component("rng", Box({"torch": torch.full((16,), step % 256, dtype=torch.uint8)}), Sharing.PER_RANK),
    ]


def write_model_files(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "empty.txt").write_text("")


def failing(error: Exception) -> Callable[[Path], None]:
    """In the place of ``write_model_files``."""

    def write(directory: Path) -> None:
        raise error

    return write


def rows(named: dict[str, Tensor]) -> dict[str, LocalShard]:
    return {name: LocalShard(tensor, 0, tuple(tensor.shape)) for name, tensor in named.items()}


def settings_of(**changes: Any) -> RunSettings:
    return RunSettings(**{"async_save": False, "save_total_limit": None, **changes})


def checkpointer(root: Path, *, max_shard_bytes: int | None = None, **settings: Any) -> Checkpointer:
    """Collective where there are several ranks."""
    more = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    here = world()
    return Checkpointer(
        RunDir(root), args=settings_of(**settings), group=cpu_group(), rank=here.rank, world_size=here.size, **more
    )


def save(saver: Checkpointer, step: int, *, size: int = 64, **changes: Any) -> bool:
    given: dict[str, Any] = {
        "model": rows(tensors(step, size)),
        "optimizer": rows(moments(step, size)),
        "components": components(step),
        "write_model_files": write_model_files,
        "info": {"strategy": "single", "config_fingerprint": "f1", "epoch": 0.5},
        "metrics": {"loss": 2.0},
        "healthy": True,
        **changes,
    }
    saver.run.root.mkdir(parents=True, exist_ok=True)
    return saver.save(step, **given)


def saved_run(root: Path, *steps: int, **changes: Any) -> RunDir:
    """A run with good checkpoints of ``steps``."""
    saver = checkpointer(root)
    for step in steps:
        assert save(saver, step, **changes), saver.failures
    saver.close()
    return RunDir(root)


def assert_content(reader: Reader, step: int, size: int = 64) -> None:
    """Everything in the checkpoint is what ``save`` stored at ``step``, to the last bit."""
    assert reader.step == step
    for kind, expected in (("model", tensors(step, size)), ("optimizer", moments(step, size))):
        names = reader.model_names() if kind == "model" else reader.optimizer_names()
        assert names == sorted(expected)
        for name, tensor in expected.items():
            assert_equal(reader.read(name, kind), tensor)  # type: ignore[arg-type]
    assert reader.state("trainer") == {"step": step, "history": (1.5, float("inf"))}
    assert reader.state("rng")["torch"].tolist() == [step % 256] * 16


def assert_equal(a: Tensor, b: Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert torch.equal(a, b)


def debris(run: RunDir) -> list[str]:
    """What lies in the checkpoint directory and is not a checkpoint."""
    return sorted(path.name for path in run.checkpoints.glob("*") if not path.name.startswith("step-"))


def after_a_kill(run: RunDir, reached: int, size: int) -> int:
    """What a killed process has left: checkpoints are whole, the rest is cleared away. Returns the newest step.

    ``reached``: the newest step after the kill before. Says whether this one was in a save.
    """
    print("killed in a save" if debris(run) else "killed between")
    for step in run.checkpoint_steps():
        assert_content(Reader(run.checkpoint(step)), step, size)
    checkpointer(run.root).clean()
    assert not debris(run), debris(run)
    reader = newest_valid(run)
    step = reader.step if reader else 0
    assert step == (run.checkpoint_steps() or [0])[-1] >= reached, (step, reached)
    return step


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files of this process get no larger than ``limit`` bytes: RLIMIT_FSIZE makes real writes fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damage(path: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(path.read_bytes())
    content = change(content) or content
    path.write_bytes(content)


def flip(position: int) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        content[position] ^= 0x10

    return change


def resign(path: Path) -> None:
    """Hash a checkpoint's files anew, as whoever has changed some of them would."""
    document = json.loads((path / "manifest.json").read_text())
    for name in document["files"]:
        content = (path / name).read_bytes()
        ranges = [[0, len(content), hashlib.sha256(content).hexdigest()]] if content else []
        document["files"][name] = {"size": len(content), "ranges": ranges}
    sign(path, document)


def sign(path: Path, document: dict[str, Any]) -> None:
    """Make that a checkpoint's manifest, with the checksum that it must have."""
    document.pop("checksum", None)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(document))


def newest(run: RunDir, level: Any = "full") -> Reader:
    """The newest valid checkpoint, of which there is one."""
    return newest_valid(run, level)


def io_bytes(kind: str) -> int:
    """Bytes that this process has read (``rchar``) or written (``wchar``)."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())[kind])
