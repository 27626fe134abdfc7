"""Packings and isolation on token files small enough to check by hand."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forgather_cli.data.cache import Cache
from forgather_cli.data.packing import best_fit, packed_tables, pieces_of, whole_pieces
from forgather_cli.data.samples import ConcatDataset, PackedDataset
from forgather_cli.data.tokens import ArrayFile, Tokenized, Tokens, TokenSplit

PAD, NONE = 99, -100


def array_file(path: Path, values: list[int], dtype: str) -> ArrayFile:
    np.array(values, dtype).tofile(path)
    return ArrayFile(path, dtype, len(values))


@pytest.fixture
def split(tmp_path: Path) -> TokenSplit:
    """Documents of 3, 5, 1 and 4 tokens: 0-2, 3-7, 8, 9-12."""
    tokens = Tokens([array_file(tmp_path / "t.bin", list(range(13)), "uint16")])
    return TokenSplit(tokens, array_file(tmp_path / "d.bin", [0, 3, 8, 9, 13], "int64"))


def rows(batch: dict[str, torch.Tensor], key: str = "input_ids") -> list[list[int]]:
    return batch[key].tolist()


def test_concat_leaves_a_partial_sample_out_or_pads_it_and_gives_single_samples(split: TokenSplit) -> None:
    cut, data = (ConcatDataset(split.tokens, 4, PAD, keep_tail=keep) for keep in (False, True))
    batch = cut.__getitems__([2, 0])
    assert (len(cut), len(data), len(list(iter(data)))) == (3, 4, 4)
    assert rows(batch) == rows(batch, "labels") == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert set(batch) == {"input_ids", "labels"}
    batch["labels"][0, 0] = NONE
    assert batch["input_ids"][0, 0] == 8, "labels are a copy"
    batch = data.__getitems__([3, 1])
    assert rows(batch) == [[12, PAD, PAD, PAD], [4, 5, 6, 7]]
    assert rows(batch, "labels") == [[12, NONE, NONE, NONE], [4, 5, 6, 7]]
    assert data[1]["input_ids"].tolist() == [4, 5, 6, 7]
    with pytest.raises(IndexError):
        data[4]


def test_isolated_concat_and_that_it_travels_as_paths(split: TokenSplit) -> None:
    data = ConcatDataset(split.tokens, 5, PAD, keep_tail=True, documents=split.documents)
    batch = data.__getitems__([0, 1, 2])
    assert rows(batch) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, PAD, PAD]]
    assert rows(batch, "labels") == [[NONE, 1, 2, NONE, 4], [5, 6, 7, NONE, NONE], [10, 11, 12, NONE, NONE]]
    assert rows(batch, "document_ids") == [[1, 1, 1, 2, 2], [0, 0, 0, 1, 2], [0, 0, 0, 1, 1]]
    assert batch["document_ids"].dtype == torch.int32
    assert len(sent := pickle.dumps(data)) < 2000
    assert rows(pickle.loads(sent).__getitems__([2])) == rows(batch)[2:]


def test_isolation_agrees_with_a_slow_way(tmp_path: Path) -> None:
    borders = np.unique(np.append(np.random.default_rng(0).integers(1, 500, 60), [0, 500]))
    document_of = np.searchsorted(borders, np.arange(500), "right")
    tokens = Tokens([array_file(tmp_path / "t.bin", list(range(500)), "uint16")])
    documents = array_file(tmp_path / "d.bin", borders.tolist(), "int64")
    batch = ConcatDataset(tokens, 16, PAD, keep_tail=False, documents=documents).__getitems__(list(range(31)))
    for sample in range(31):
        expected = document_of[sample * 16 : sample * 16 + 16]
        got = batch["document_ids"][sample].numpy()
        assert ((got[:, None] == got) == (expected[:, None] == expected)).all()
        starts = np.isin(np.arange(sample * 16, sample * 16 + 16), borders)
        assert ((batch["labels"][sample].numpy() == NONE) == starts).all()


def table(tmp_path: Path, split: TokenSplit, seq_len: int, packing: str, isolate: bool) -> PackedDataset:
    data = Tokenized(split, None, "f", {})
    tables = packed_tables(Cache(tmp_path / "cache"), data, seq_len, packing)
    return PackedDataset(split.tokens, tables["train"], seq_len, PAD, isolate=isolate)


def test_pad_has_one_piece_per_sample(tmp_path: Path, split: TokenSplit) -> None:
    data = table(tmp_path, split, 4, "pad", isolate=False)
    batch = data.__getitems__(list(range(len(data))))
    # the documents' last single tokens (7, and 8) hold no target by themselves
    assert rows(batch) == [[0, 1, 2, PAD], [3, 4, 5, 6], [9, 10, 11, 12]]
    assert rows(batch, "labels") == [[0, 1, 2, NONE], [3, 4, 5, 6], [9, 10, 11, 12]]
    assert "document_ids" not in batch


def test_best_fit_fills_rows_with_and_without_isolation(tmp_path: Path, split: TokenSplit) -> None:
    data = table(tmp_path, split, 8, "best_fit", isolate=True)
    batch = data.__getitems__(list(range(len(data))))
    assert rows(batch) == [[0, 1, 2, 3, 4, 5, 6, 7], [9, 10, 11, 12, PAD, PAD, PAD, PAD]]
    assert rows(batch, "labels") == [[NONE, 1, 2, NONE, 4, 5, 6, 7], [NONE, 10, 11, 12, NONE, NONE, NONE, NONE]]
    assert rows(batch, "document_ids") == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]]
    batch = table(tmp_path, split, 8, "best_fit", isolate=False).__getitems__([0])
    assert rows(batch, "labels") == [[0, 1, 2, 3, 4, 5, 6, 7]], "targets cross borders"
    assert "document_ids" not in batch


def test_pieces_cover_every_token_once() -> None:
    starts, lengths = pieces_of(np.array([0, 1, 6, 16, 40, 41, 43]), 5)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    assert lengths.max() == 5
    assert sorted(covered) == sorted(set(range(43)) - {0, 40})  # but single tokens


def test_conversations_are_cut_or_dropped_and_those_without_a_target_left_out() -> None:
    borders, firsts = np.array([0, 5, 14, 14, 20, 32]), np.array([4, 3, 0, 6, 8])
    starts, lengths, counts = whole_pieces(borders, firsts, 8, "cut")
    assert (starts.tolist(), lengths.tolist()) == ([0, 5], [5, 8])
    assert counts == {"cut": 1, "dropped": 0, "empty": 3}
    starts, lengths, counts = whole_pieces(borders, firsts, 8, "drop")
    assert (starts.tolist(), lengths.tolist(), counts) == ([0], [5], {"cut": 0, "dropped": 2, "empty": 2})


def test_rows_with_tokens_are_found(tmp_path: Path, split: TokenSplit) -> None:
    tables = packed_tables(Cache(tmp_path / "cache"), Tokenized(split, None, "f", {}), 4, "best_fit")["train"]
    assert [tables.pieces(row) for row in range(len(tables))] == [[(3, 4)], [(9, 4)], [(0, 3)]]
    found = [tables.rows_with(start, stop) for start, stop in ((0, 1), (2, 3), (2, 4), (6, 9), (7, 9), (0, 13))]
    assert found == [[2], [2], [0, 2], [0], [], [0, 1, 2]]


def test_tables_of_before_are_used_again(tmp_path: Path, split: TokenSplit) -> None:
    for packing, more in (("pad", {}), ("best_fit", {}), ("pad", {"too_long": "cut"})):
        data = replace(split, first_targets=array_file(tmp_path / "f.bin", [0] * 4, "int64"))
        packed_tables(Cache(tmp_path / "cache"), Tokenized(data, None, "f", {}), 8, packing, **more)
    names = sorted(path.name[:8] for path in (tmp_path / "cache/packings").iterdir())
    assert names == ["6adf2401", "8136ca82", "eceaf1b3"]


def test_best_fit_packs_tightly_and_loses_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 5000)
    order, borders = best_fit(lengths, 64)
    assert sorted(order) == list(range(5000))
    fill = np.add.reduceat(lengths[order], borders[:-1])
    assert fill.max() <= 64
    assert fill.sum() == lengths.sum()
    assert fill.mean() / 64 > 0.99
    assert [part.tolist() for part in best_fit(np.array([1]), 8)] == [[0], [0, 1]]
    assert [part.tolist() for part in best_fit(np.array([3, 8, 5, 4, 4]), 8)] == [[1, 0, 2, 3, 4], [0, 1, 3, 5]]


def test_several_files_read_as_one(tmp_path: Path) -> None:
    files = [array_file(tmp_path / f"{i}.bin", list(range(i * 10, i * 10 + 10)), "uint16") for i in range(3)]
    files.insert(1, array_file(tmp_path / "empty.bin", [], "uint16"))
    tokens = Tokens(files, 3, 28)
    out = np.empty(20, np.int64)
    tokens.read(4, out)
    assert len(tokens) == 25
    assert out.tolist() == list(range(7, 27))
    tokens.read(7, out[:3])
    assert out[:3].tolist() == [10, 11, 12]
