"""Which byte of which file every row is, which rank writes it, and numbers that are not finite: by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forgather_cli.checkpoint.format import FiniteScan, Piece, TensorFile, TensorSpec, is_finite, plan, read_header
from forgather_cli.documents.encoding import DTYPES, raw_bytes
from forgather_cli.errors import CheckpointError

WORD, WORDS = {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}, {"dtype": "F32", "shape": [2]}


def written(path: Path, header: Any, data: int, more: int = 0) -> int:
    """A file with so many bytes behind its header, whose length is said with ``more``. Where they begin."""
    text = json.dumps(header).encode()
    path.write_bytes((len(text) + more).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + data)
    return 8 + len(text)


def test_a_header_says_where_each_tensor_is(tmp_path: Path) -> None:
    none = {"dtype": "I16", "shape": [0, 3], "data_offsets": [8, 8]}
    header = {"b": WORDS | {"data_offsets": [8, 16]}, "none": none, "a": WORD, "__metadata__": {"by": "hand"}}
    begin = written(tmp_path / "x", header, 16)
    assert read_header(tmp_path / "x") == {
        "a": (TensorSpec("a", "F64", ()), begin), "none": (TensorSpec("none", "I16", (0, 3)), begin + 8),
        "b": (TensorSpec("b", "F32", (2,)), begin + 8),
    }  # fmt: skip
    written(tmp_path / "x", {}, 0)
    assert read_header(tmp_path / "x") == {}


@pytest.mark.parametrize(
    ("header", "data", "more", "message"),
    [
        ({}, 0, 1, "longer than the file"),
        ({}, 200_000_000, 99_999_999, "longer than the file"),
        ({"a": WORD, "b": WORDS | {"data_offsets": [9, 17]}}, 17, 0, "of b leave a gap"),
        ({"a": WORD, "b": WORDS | {"data_offsets": [7, 15]}}, 15, 0, "of b overlap"),
        ({"a": WORD}, 9, 0, "are 8 of 9 bytes"),
        ({"a": WORD}, 7, 0, "are 8 of 7 bytes"),
        ({"a": WORD | {"dtype": "F5"}}, 8, 0, "a has dtype F5"),
        ({"a": WORDS | {"shape": [2.0], "data_offsets": [0, 8]}}, 8, 0, "whole numbers"),
        ({"a": WORDS | {"data_offsets": [-1, 7]}}, 8, 0, "whole numbers"),
        ({"a": WORDS | {"data_offsets": [0, 9]}}, 9, 0, "do not match its shape"),
        ({"a": WORDS | {"data_offsets": [0, 80]}}, 8, 0, "do not match its shape"),
        ({"a": WORDS | {"shape": [-2, -1], "data_offsets": [0, 8]}}, 8, 0, ""),
        ({"a": WORDS | {"shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, 8, 0, ""),
        ({"a": WORDS | {"shape": 2, "data_offsets": [0, 8]}}, 8, 0, ""),
        ([1], 8, 0, ""),
    ],
)
def test_headers_of_other_files_are_refused(tmp_path: Path, header: Any, data: int, more: int, message: str) -> None:
    written(tmp_path / "x", header, data, more)
    with pytest.raises(CheckpointError, match=f"x: is not a safetensors file .*{message}"):
        read_header(tmp_path / "x")
    with pytest.raises(CheckpointError, match="y: cannot be read"):
        read_header(tmp_path / "y")


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point], ids=str)
def test_the_largest_number_is_finite_and_what_comes_behind_it_is_not(dtype: torch.dtype) -> None:
    def finite(*numbers: float) -> bool:
        return all_finite(torch.tensor(numbers, dtype=torch.float64).to(dtype))

    def all_finite(tensor: Tensor) -> bool:
        return is_finite(memoryview(raw_bytes(tensor).numpy().tobytes()), DTYPES[dtype])

    bits = 8 * dtype.itemsize
    integers = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    upper = torch.arange(0, 1 << min(bits, 16), 1 if bits == 8 else 97) << max(bits - 16, 0)
    for value in upper.to(integers).view(dtype):  # of any sign and exponent, and of NaNs the bits behind them
        assert all_finite(torch.stack([torch.zeros_like(value), value])) == bool(value.double().isfinite()), value
    limits, nan = torch.finfo(dtype), float("nan")
    assert finite(limits.max, limits.min, 0.0, 1.0, limits.tiny)
    assert not any(finite(*numbers) for numbers in ([nan], [0.0, nan], [limits.max, nan], [limits.min, -nan, 1.0]))
    if dtype != torch.float8_e4m3fn:  # which has no infinity
        assert not finite(limits.max, float("inf"))
        assert not finite(float("-inf"), 0.0)


@pytest.mark.parametrize("size", [8, 13, 24, 4096])
def test_a_scan_sees_the_numbers_that_a_piece_of_the_file_holds_whole(tmp_path: Path, size: int) -> None:
    path, dtypes = tmp_path / "x.safetensors", {"a": torch.float64, "b": torch.float32, "d": torch.bfloat16}
    for changed, dtype in dtypes.items():
        for place in range(5):
            tensors = {name: torch.ones(5, dtype=dtype) for name, dtype in dtypes.items()}
            tensors["c"], tensors["e"] = torch.full([3], torch.nan), torch.full([9], -1, dtype=torch.int8)
            tensors[changed][place] = torch.inf
            save_file(tensors, path)
            scan, content = FiniteScan(path, ["c"]), path.read_bytes()
            for offset in range(0, len(content), size):
                scan.look(offset, memoryview(content)[offset : offset + size])
            first = read_header(path)[changed][1] + place * dtype.itemsize
            is_whole = first // size == (first + dtype.itemsize - 1) // size
            assert list(scan.found) == ([changed] if is_whole else [])


def whole(*specs: TensorSpec) -> list[Piece]:
    return [Piece(spec, 0, spec.num_rows) for spec in specs]


A, B = TensorSpec("a", "BF16", (4, 2)), TensorSpec("b", "F32", (8,))
C, D = TensorSpec("c", "F64", ()), TensorSpec("d", "I64", (0, 4))


def test_sizes_of_tensors() -> None:
    sizes = [(each.num_rows, each.row_bytes, each.num_bytes, each.num_elements) for each in (A, B, C, D)]
    assert sizes == [(4, 4, 16, 8), (8, 4, 32, 8), (1, 8, 8, 1), (0, 32, 0, 0)]
    assert {name: TensorSpec("x", name, (1,)).num_bytes for name in DTYPES.values()} == {
        name: dtype.itemsize for dtype, name in DTYPES.items()
    }


@pytest.mark.parametrize("length", range(8))
def test_data_begins_at_a_multiple_of_eight(length: int, tmp_path: Path) -> None:
    file = TensorFile("x", (TensorSpec("b" * length, "F32", (3,)), TensorSpec("c", "F32", (2,))))
    (tmp_path / "x").write_bytes(file.header + bytes(20))
    assert {name: at for name, (_, at) in read_header(tmp_path / "x").items()} == file.offsets
    begin = 8 + int.from_bytes(file.header[:8], "little")
    text = file.header[8:].decode()
    assert json.loads(text)["__metadata__"] == {"format": "pt"}
    assert (begin, begin % 8, len(text) - len(text.rstrip()) < 8) == (len(file.header), 0, True)
    assert file.offsets == {"b" * length: begin, "c": begin + 12}
    assert file.size == begin + 20


def test_a_file_ends_where_the_next_tensor_is_too_much_and_has_wide_numbers_first() -> None:
    made = plan([whole(A, B, C, D)], "m/x", max_bytes=48)
    first, second = "x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"
    names = [(file.path, [spec.name for spec in file.specs]) for file in made.files]
    assert names == [(f"m/{first}", ["b", "a"]), (f"m/{second}", ["c", "d"])]
    index = {"metadata": {"total_size": 56}, "weight_map": {"a": first, "b": first, "c": second, "d": second}}
    assert made.index() == json.dumps(index, indent=2).encode()
    assert [len(file.specs) for file in plan([whole(A, B, C)], "x", max_bytes=47).files] == [1, 2]
    one = plan([whole(A, B, C)], "m/x")
    assert ([file.path for file in one.files], one.index()) == (["m/x.safetensors"], None)


@pytest.mark.parametrize(("size", "files"), [(5_000_000_000, 1), (5_000_000_001, 2)])
def test_the_limit_of_a_file_is_that_of_hugging_face(size: int, files: int) -> None:
    specs = [TensorSpec("a", "U8", (size - 1,)), TensorSpec("b", "U8", (1,)), TensorSpec("c", "U8", (0,))]
    assert len(plan([whole(*specs)], "x").files) == files


X, Y, Z = TensorSpec("x", "F32", (10,)), TensorSpec("y", "F32", (6,)), TensorSpec("z", "F32", (5, 3))
V, W = TensorSpec("v", "F32", (1000,)), TensorSpec("w", "F32", (600,))


@pytest.mark.parametrize(
    ("held", "writes"),
    [
        ([whole(X)] * 3, [[("x", 0, 3)], [("x", 3, 4)], [("x", 7, 3)]]),
        ([whole(Y, X)] * 2, [[("x", 0, 8)], [("x", 8, 2), ("y", 0, 6)]]),
        ([whole(Z)] * 4, [[("z", 0, 1)], [("z", 1, 1)], [("z", 2, 2)], [("z", 4, 1)]]),
        # 60 bytes of one rank's own, 40 of another's: what three hold fills the others up
        ([whole(Z, Y), whole(X, Y), whole(Y)], [[("z", 0, 5)], [("x", 0, 10)], [("y", 0, 6)]]),
        ([whole(V), whole(W, V), whole(V)], [[("v", 0, 500)], [("w", 0, 600)], [("v", 500, 500)]]),
        ([whole(X, Y)] * 3, [[("x", 0, 5)], [("x", 5, 5), ("y", 0, 1)], [("y", 1, 5)]]),
        ([[Piece(X, 5, 5), *whole(Y)], [Piece(X, 0, 5), *whole(Y)]],
         [[("x", 5, 5), ("y", 0, 3)], [("x", 0, 5), ("y", 3, 3)]]),
        ([[Piece(V, start, 500)] for start in (0, 0, 500, 500)],  # HSDP 2x2
         [[("v", start, 250)] for start in (0, 250, 500, 750)]),
        ([whole(D), whole(D)], [[], []]),
    ],
)  # fmt: skip
def test_ranks_write_what_they_hold_in_equal_shares(held: list[list[Piece]], writes: list[list[Any]]) -> None:
    made = plan(held, "m")
    assert [[(p.spec.name, p.start, p.rows) for p in pieces] for pieces in made.writes] == writes


def test_shares_are_all_rows_though_floats_cannot_count_them() -> None:
    made = plan([whole(TensorSpec("a", "U8", (2**60 + 1,)))] * 3, "m", max_bytes=2**61)
    assert sum(piece.rows for pieces in made.writes for piece in pieces) == 2**60 + 1


def test_the_header_is_for_the_rank_that_writes_the_first_byte() -> None:
    made = plan([[Piece(X, 5, 5)], [Piece(X, 0, 5), *whole(Y)]], "m")
    (file,) = made.files
    begin = len(file.header)
    assert made.parts(file, 0) == [(begin + 20, Piece(X, 5, 5))]
    assert made.parts(file, 1) == [(0, None), (begin, Piece(X, 0, 5)), (begin + 40, Piece(Y, 0, 6))]
    cut = plan([[Piece(X, 5, 5)], [Piece(X, 0, 5), *whole(Y)]], "m", max_bytes=40)
    assert [[len(cut.parts(file, rank)) for file in cut.files] for rank in (0, 1)] == [[1, 0], [2, 2]]
    empty = plan([whole(D), whole(D)], "m")
    assert [empty.parts(empty.files[0], rank) for rank in (0, 1)] == [[(0, None)], []]
