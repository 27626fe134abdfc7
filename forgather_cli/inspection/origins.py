"""The file and line that a document of the cache comes from, and the documents of a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from forgather_cli.config.schema import DataOption
from forgather_cli.data.build import source_of
from forgather_cli.data.cache import Cache
from forgather_cli.data.text.corpus import CorpusPiece, Documents, is_held_out
from forgather_cli.data.text.read import Damage, Document, kind_of, rows_before
from forgather_cli.data.tokens import Split, Tokenized
from forgather_cli.documents.regular_files import RECORDS

Place = tuple[str, int | None]
"""A file and a line or record from 1, None where it is one document; or a split of the datasets library and a row from
0, as the library has them."""


class Origins:
    """Where the documents of an option's tokens come from. Of some options nobody knows."""

    def __init__(self, option: DataOption, data: Tokenized | None) -> None:
        self._option, self._source, self._data = option, source_of(option), data
        self._read: dict[tuple[Split, int], list[Place]] = {}

    @cached_property
    def _corpus(self) -> Documents | None:
        """Whose documents are found by reading a piece of it again."""
        return self._source.text(Cache(self._option.cache_dir))

    @cached_property
    def _names(self) -> Sequence[Path | str]:
        """What documents are in, by number: files, or splits of the datasets library."""
        return self._source.origins() if self._corpus is None else self._corpus.names

    def place(self, split: Split, document: int) -> Place | None:
        """Of a document by its number in a split."""
        if self._data is None:
            return None
        records = self._data.splits()[split].records
        if records is not None:
            file, line = records.array[2 * document : 2 * document + 2].tolist()
            return str(self._names[file]), line
        counts = self._data.meta.get("pieces")
        if counts is None or self._corpus is None:
            return None
        ends = np.cumsum(counts[split])
        piece = int(ends.searchsorted(document, "right"))
        if piece == len(self._pieces):  # the last document, whose end is held out
            return self._last()
        return self._places(split, piece)[document - int(ends[piece] - counts[split][piece])]

    def files(self, split: Split) -> list[str]:
        """The file of each document of a split; empty where nobody knows. Of text in several files all is read."""
        if self._data is None:
            return []
        records = self._data.splits()[split].records
        if records is not None:
            return [str(self._names[number]) for number in records.array[::2].tolist()]
        counts = self._data.meta.get("pieces")
        if counts is None or self._corpus is None:
            return []
        if len(self._names) == 1:
            return [str(self._names[0])] * sum(counts[split])
        names = [place[0] for number in range(len(self._pieces)) for place in self._places(split, number)]
        if len(names) < sum(counts[split]):  # the end of the last document
            names.append(self._last()[0])
        return names

    def documents(self, path: Path, line: int | None) -> dict[Split, list[int]]:
        """Numbers of the documents that a record, or a whole file, has become, by split."""
        found: dict[Split, list[int]] = {}
        if self._data is None or not all(isinstance(name, Path) for name in self._names):
            return found
        for split, tokens in self._data.splits().items():
            if tokens.records is not None:
                records = tokens.records.array.reshape(-1, 2)
                numbers = [n for n, each in enumerate(self._names) if each == path]
                wanted = np.isin(records[:, 0], numbers)
                if line is not None:
                    wanted &= records[:, 1] == line
                found[split] = np.flatnonzero(wanted).tolist()
            elif (counts := self._data.meta.get("pieces")) is not None and self._corpus is not None:
                before = np.cumsum(counts[split]) - counts[split]
                found[split] = [
                    int(before[number]) + at
                    for number, piece in enumerate(self._pieces)
                    if any(path == self._names[part[0]] for part in piece.parts)
                    for at, place in enumerate(self._places(split, number))
                    if place[0] == str(path) and (line is None or place[1] in (None, line))
                ]
        return found

    @cached_property
    def _pieces(self) -> list[CorpusPiece]:
        assert self._corpus is not None
        return self._corpus.pieces()

    def _last(self) -> Place:
        """Of the corpus's last document, whose end is held out."""
        numbers = reversed(range(len(self._pieces)))
        return next(found for number in numbers if (found := self._places("train", number)))[-1]

    def _places(self, split: Split, number: int) -> list[Place]:
        """Of the documents of one piece that are in a split."""
        if (split, number) not in self._read:
            assert self._data is not None
            counts = self._data.meta["pieces"]
            is_first = not any(counts[name][n] for name in ("train", "eval") for n in range(number))
            places: dict[Split, list[Place]] = {"train": [], "eval": []}
            for place, document in self._of_piece(self._pieces[number]):
                assert self._corpus is not None
                out = self._pieces[number].is_eval or is_held_out(self._corpus, document, is_first=is_first)
                places["eval" if out else "train"].append(place)
                is_first = False
            self._read |= {(name, number): each for name, each in places.items()}
        return self._read[split, number]

    def _of_piece(self, piece: CorpusPiece) -> Iterator[tuple[Place, Document]]:
        """Every document of a piece with its place."""
        assert self._corpus is not None
        if not isinstance(self._names[0], Path):
            for document in self._corpus.read(piece, Damage()):
                held_out, row = map(int, document.name.split(":"))
                yield (str(self._names[held_out]), row), document
            return
        for part in piece.parts:
            path = Path(self._names[part[0]])
            has_records = kind_of(path) in RECORDS
            before = rows_before(path, part[1]) if has_records and part[1].start else 0
            for document in self._corpus.read(piece._replace(parts=[part]), Damage()):
                line = before + int(document.name.rpartition(":")[2]) if has_records else None
                yield (str(path), line), document
