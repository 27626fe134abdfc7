"""What ranks send each other: every value comes back as it was, and nothing that is read runs."""

from __future__ import annotations

import ast
import errno
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import forgather_cli
from forgather_cli.checkpoint.format import Piece, TensorSpec
from forgather_cli.checkpoint.manifest import BestBy, DamagedError, FileEntry, Manifest
from forgather_cli.distributed import gather, on_rank_0
from forgather_cli.documents.messages import pack, unpack
from forgather_cli.errors import ConfigError, OutOfMemoryError

VALUES: list[Any] = [
    None, True, 2**80, -1, 0.1, float("inf"), "ä\0", [], (), {}, set(), b"\x80", Path("a/b"), {"@": 1}, {"$": "int"},
    {1: "one", (2, "b"): [(3,)]}, {"lr": 1e-3, "betas": (0.9, 0.95), "foreach": None}, {3, 5}, OrderedDict(a=(1,)),
    [Piece(TensorSpec("w", "F32", (4, 2)), 0, 2)], np.float32(0.5),
    Manifest(1, "ddp", 2, "now", best_by=BestBy("loss", False), files={"a": FileEntry(3, ((0, 3, "x"),))}),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_tensors_and_arrays_come_back_bit_for_bit() -> None:
    sent = [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(True), np.arange(4.0).reshape(2, 2)]
    for one, other in zip(sent, unpack(pack((1, sent)))[1], strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert bool((one == other).all())


def test_errors_come_back_with_what_they_know() -> None:
    mistake = unpack(pack(ConfigError(["a: wrong", "b: wrong"])))
    assert (type(mistake), mistake.problems) == (ConfigError, ["a: wrong", "b: wrong"])
    memory = unpack(pack(OutOfMemoryError("too much", 8, 4)))
    assert (str(memory), memory.batch, memory.smaller_batch) == ("too much", 8, 4)
    gone = unpack(pack(FileNotFoundError(errno.ENOENT, "No such file", "x")))
    assert (type(gone), gone.filename, gone.strerror) == (FileNotFoundError, "x", "No such file")


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_a_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bomb = torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8)
    for content in (bomb, torch.cat([torch.tensor([len(bomb), *[0] * 7], dtype=torch.uint8), bomb])):
        with pytest.raises(ValueError, match=r"JSON|utf|Expecting|codec"):
            unpack(content)
    assert not Path("ran").exists()


def _told() -> tuple[Any, Any, str]:
    rank = dist.get_rank()
    group = dist.group.WORLD

    def broken() -> None:
        raise DamagedError("step 3 is damaged")

    with pytest.raises(DamagedError) as failed:
        on_rank_0(broken, group)
    return gather({"rank": (rank, "x" * rank)}, group), on_rank_0(lambda: {3: Path("p")}, group), str(failed.value)


def test_ranks_tell_each_other_values_of_any_length_and_errors() -> None:
    expected = ([{"rank": (0, "")}, {"rank": (1, "x")}], {3: Path("p")}, "step 3 is damaged")
    assert run_ranks(2, _told) == [expected, expected]


def test_no_module_of_ours_reads_a_pickle_or_has_torch_send_one() -> None:
    forbidden = {"pickle", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                 "send_object_list", "recv_object_list"}  # fmt: skip
    for path in Path(forgather_cli.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not names & forbidden, path
