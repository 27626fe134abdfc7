"""Checksums that find a single changed bit, and what is said of ranks that differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forgather_cli.checkpoint import replication
from forgather_cli.checkpoint.components import LocalShard
from forgather_cli.checkpoint.format import Piece, TensorSpec
from forgather_cli.checkpoint.replication import ReplicationCheck, checksums, digest_of, refuse, sha256_of
from forgather_cli.documents.encoding import DTYPES, Encoded
from forgather_cli.errors import ReplicationError

SUMS = {"tensor": lambda tensor: checksums({"": tensor})[""], "full": sha256_of}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small tensor has several."""
    monkeypatch.setattr(replication, "_CHUNK", 64)
    replication._weights.cache_clear()


def bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of random bits; bools are 0 or 1."""
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return ((raw % 2).bool() if dtype is torch.bool else raw.view(dtype)).reshape(shape)


@pytest.mark.parametrize("level", SUMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_counts(dtype: torch.dtype, level: str) -> None:
    tensor = bits(dtype, 11, 9)
    expected = SUMS[level](tensor)
    raw = tensor.view(torch.uint8)
    seen = set()
    for position in range(0, raw.numel(), 7):
        for bit in range(8) if dtype is not torch.bool else (0,):
            raw.view(-1)[position] ^= 1 << bit
            seen.add(SUMS[level](tensor))
            raw.view(-1)[position] ^= 1 << bit
    assert len(seen) == len(range(0, raw.numel(), 7)) * (8 if dtype is not torch.bool else 1)
    assert expected not in seen
    assert SUMS[level](tensor) == expected


@pytest.mark.parametrize("level", SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_exchanged_elements_and_rows_count(dtype: torch.dtype, level: str) -> None:
    tensor = torch.arange(2000).to(dtype).reshape(100, 20)
    expected = SUMS[level](tensor)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        i, j = torch.randperm(2000, generator=generator)[:2].tolist()
        other = tensor.clone().view(-1)
        other[[i, j]] = other[[j, i]]
        assert SUMS[level](other.view(100, 20)) != expected or tensor.view(-1)[i] == tensor.view(-1)[j]
    rows = torch.randperm(100, generator=generator)
    assert SUMS[level](tensor[rows]) != expected


@pytest.mark.parametrize("level", SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_equal_values_are_equal_whatever_their_strides(dtype: torch.dtype, level: str) -> None:
    tensor = torch.randn(37, 53).to(dtype)
    wide = torch.empty(53, 37, 2, dtype=dtype)
    wide[..., 0] = tensor.t()
    for other in (tensor.t().contiguous().t(), wide[..., 0].t(), torch.nn.Parameter(tensor.clone())):
        assert SUMS[level](other) == SUMS[level](tensor)
    assert SUMS[level](torch.tensor(2.0)) == SUMS[level](torch.tensor(2.0))
    assert SUMS[level](torch.zeros(0, 3)) == SUMS[level](torch.zeros(0, 3))
    assert SUMS[level](torch.tensor(0.0)) != SUMS[level](torch.tensor(-0.0))


def test_memory_beside_the_tensor_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "_CHUNK", 1 << 12)
    replication._weights.cache_clear()
    tensor = torch.randn(1 << 16, 8)
    checksums({"": tensor[:1]})
    with torch.profiler.profile(profile_memory=True) as profile:
        checksums({"": tensor})
    largest = max(event.self_cpu_memory_usage / max(event.count, 1) for event in profile.key_averages())
    assert 0 < largest <= 16 << 12 < tensor.nbytes / 10


def two_ranks(level: str, *pieces: tuple[Piece, Piece], sums: tuple[dict[str, int], dict[str, int]]) -> list[str]:
    held = [[mine for mine, _ in pieces], [other for _, other in pieces]]
    return ReplicationCheck(level).differences(0, held, sums)  # type: ignore[arg-type]


def test_who_differs_in_what_is_told() -> None:
    spec = TensorSpec("w", "F32", (8, 2))
    whole, first, second = Piece(spec, 0, 8), Piece(spec, 0, 4), Piece(spec, 4, 4)
    assert two_ranks("tensor", (whole, whole), sums=({"w": 1}, {"w": 1})) == []
    assert two_ranks("tensor", (whole, whole), sums=({"w": 1}, {"w": 2})) == ["w (rank 0 unlike rank 1)"]
    assert two_ranks("tensor", (first, second), sums=({"w": 1}, {"w": 2})) == []
    assert two_ranks("tensor", (whole, whole), sums=({"w": 1}, {})) == []  # looked at from the next save on
    other = Piece(TensorSpec("w", "BF16", (8, 2)), 0, 8)
    assert two_ranks("quick", (whole, other), sums=({}, {})) == ["w (rank 0: F32 [8, 2]; rank 1: BF16 [8, 2])"]
    assert two_ranks("none", (whole, other), sums=({}, {})) == []
    with pytest.raises(ReplicationError, match=r"step 7 is not saved.* a, b, c, d, e and 2 more; find"):
        refuse(list("abcdefg"), 7)


def test_what_no_other_rank_holds_is_looked_at_once() -> None:
    mine, shared = torch.randn(4, 2), torch.randn(3)
    rows = {"mine": LocalShard(mine, 0, (8, 2)), "shared": LocalShard(shared)}
    pieces = [row.piece(name) for name, row in rows.items()]
    check = ReplicationCheck("tensor")
    assert check.sums(rows, pieces).keys() == {"mine", "shared"}
    held = [pieces, [Piece(pieces[0].spec, 4, 4), pieces[1]]]
    assert check.differences(0, held, [check.sums(rows, pieces), {"shared": check.sums(rows, pieces)["shared"]}]) == []
    assert check.sums(rows, pieces).keys() == {"shared"}
    check.differences(0, [pieces, pieces], [{}, {}])  # the layout has changed
    assert check.sums(rows, pieces).keys() == {"mine", "shared"}


def encoded(state: object) -> Encoded:
    result = Encoded()
    result.add("scheduler", state)
    return result


def test_digests_of_components() -> None:
    state = {"lr": [0.1, float("nan")], "tensor": torch.ones(3), "tuple": (1, "a", None)}
    value = {**state, "tensor": torch.ones(3).mul_(1 + 2**-23)}
    shape = {**state, "tensor": torch.ones(4)}
    kind = {**state, "lr": [0.1, 3]}
    for level in ("quick", "tensor", "full"):
        assert digest_of(encoded(state), level) == digest_of(encoded(dict(reversed(state.items()))), level)  # type: ignore[arg-type]
        assert digest_of(encoded(state), level) != digest_of(encoded(shape), level)  # type: ignore[arg-type]
        assert digest_of(encoded(state), level) != digest_of(encoded(kind), level)  # type: ignore[arg-type]
    assert digest_of(encoded(state), "quick") == digest_of(encoded(value), "quick")
    assert digest_of(encoded(state), "tensor") != digest_of(encoded(value), "tensor")
