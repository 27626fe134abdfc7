"""``data=hf``: datasets of the ``datasets`` library, as documents for the token cache or as streams of them.

The library is imported only when such data is used, since that takes seconds. Its downloads from the hub stay in its
own cache (``HF_HOME``), where other programs find them; what it makes of local files goes into our data cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import DatasetSettings, HfSettings
from forgather_cli.data.cache import Cache, digest
from forgather_cli.data.text import read as reading
from forgather_cli.data.text.compressed import check_archives
from forgather_cli.data.text.corpus import CorpusPiece, find_files, stamp_of
from forgather_cli.data.text.read import Damage, Document, Record, kind_of
from forgather_cli.documents.regular_files import FORMATS
from forgather_cli.errors import DataError
from forgather_cli.hub import can_reach

_VERSION = 1  # of the rules below that decide what a document is
_FORMATS = tuple(dict.fromkeys(FORMATS.values()))
_LOCAL = "data.dataset=json data.data_files=[...], or a directory written by save_to_disk"
_log = logging.getLogger(__name__)


def open_datasets(option: DatasetSettings, cache: Cache) -> tuple[Any, Any | None]:
    """The (train, eval) that an option names, from the hub, its cache, or files: of the library's ``Dataset``, or
    streaming its ``IterableDataset``; of ``data=hf`` with the column of the text alone. Raises DataError."""
    path = option.dataset or FORMATS.get(kind_of(Path(option.data_files[0])))
    if path is None:
        name = option.data_files[0]
        raise DataError(f"data.data_files: cannot tell the format of {name!r}; set data.dataset={', '.join(_FORMATS)}")
    files = _data_files(option)
    directory = Path(path).expanduser()
    is_local = path in _FORMATS or directory.is_dir()
    is_saved = any((directory / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if directory.is_dir():
        path = str(directory)
        check_archives(each for each in directory.rglob("*") if each.is_file())
    named = [name for names in files.values() for name in names]
    # the library knows a local file by its modification time alone (datasets 5.2, data_files.py)
    stamp = digest([stamp_of(Path(name)) for name in named if os.path.isfile(name)])
    library = datasets_library()
    if is_local:
        cache.use("datasets", stamp)

    def load(**kwargs: Any) -> Any:
        if is_saved:
            found = library.load_from_disk(path)
            found = found if isinstance(found, dict) else {str(found.split or "train"): found}
            if not option.streaming:
                return found
            # parts in which ranks and workers may read a dataset that has no files of its own
            parts = {name: min(64, max(1, len(each))) for name, each in found.items()}
            return {name: each.to_iterable_dataset(num_shards=parts[name]) for name, each in found.items()}
        return library.load_dataset(
            path,
            name=option.dataset_config,
            data_files=files or None,
            revision=option.revision,
            streaming=option.streaming,
            cache_dir=str(cache.root / "datasets" / stamp) if is_local else None,
            **({"sep": "\t"} if path == "csv" and kind_of(Path(option.data_files[0])) == ".tsv" else {}),
            **kwargs,
        )

    splits: Any = None

    def split(setting: str, name: str) -> Any:
        """A split by its name, or a slice of one (``train[:10%]``)."""
        nonlocal splits
        if set(name) & set("[+") and not is_saved:
            return load(split=name)
        splits = load() if splits is None else splits
        if name not in splits:
            raise DataError(f"data.{setting}: no split {name!r}, the dataset has {', '.join(map(str, splits))}")
        return splits[name]

    is_remote = not is_local or any("://" in name for name in named)
    with _explained(option, library), offline_if_unreachable(library) if is_remote else contextlib.nullcontext():
        train = split("train_split", option.train_split)
        held_out = "eval" if option.eval_files else option.eval_split
        evaluation = None if held_out is None else split("eval_split", held_out)
        others = [str(name) for name in splits or () if evaluation is None and name != option.train_split]
        if others:
            _log.info("data.eval_split=%s would evaluate on a split of the dataset: it has %s", others[-1], others)
        if not isinstance(option, HfSettings):
            return train, evaluation
        key = option.text_key
        return _text_alone(train, key), None if evaluation is None else _text_alone(evaluation, key)


def datasets_library() -> Any:
    """The library without its progress bars and log lines, which would stand among ours: what matters is in its
    exceptions."""
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError("data=hf: needs the package datasets; pip install 'forgather[datasets]'") from error
    library.logging.set_verbosity(logging.CRITICAL + 1)
    library.disable_progress_bars()
    return library


def _data_files(option: DatasetSettings) -> dict[str, list[str]]:
    """Split -> files; those of this machine are looked for, those of a dataset of the hub are its own."""
    named = {"train": option.data_files, "eval": option.eval_files}
    settings = {"train": "data.data_files", "eval": "data.eval_files"}
    ours = option.dataset is None or option.dataset in _FORMATS
    return {
        split: [
            str(path)
            for pattern in patterns
            for path in ([pattern] if "://" in pattern or not ours else find_files(settings[split], [pattern]))
        ]
        for split, patterns in named.items()
        if patterns
    }


def _text_alone(dataset: Any, key: str) -> Any:
    """A dataset with the column of the text only. Raises DataError without one."""
    columns = dataset.column_names
    if columns is None:  # of a stream they are not always known before it is read
        return dataset
    if key not in columns:
        remedy = reading.text_remedy(columns)
        raise DataError(f"data.text_key: no column {key!r}, the dataset has {', '.join(columns)}; {remedy}")
    kind = getattr((dataset.features or {}).get(key), "dtype", "string")
    if kind not in ("string", "large_string"):
        raise DataError(f"data.text_key: column {key!r} holds {kind}, not text; the dataset has {', '.join(columns)}")
    return dataset.select_columns([key])


# --------------------------------------------------------------------------------------------------- the library's ways


@contextlib.contextmanager
def _explained(option: DatasetSettings, library: Any) -> Iterator[None]:
    """The library's exceptions as ours."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    name = f"data.dataset: {option.dataset!r}" if option.dataset else "data.data_files:"
    if option.dataset and option.dataset not in _FORMATS and not Path(option.dataset).expanduser().is_dir():
        name += " (no directory here)"
    missing = (library.exceptions.DatasetNotFoundError, RepositoryNotFoundError, GatedRepoError)
    try:
        yield
    except DataError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"{name} is not in the cache ({library.config.HF_DATASETS_CACHE}), and the hub cannot be reached; go "
            f"online, set HF_HOME to a cache that has it, or name local files: {_LOCAL}"
        ) from error
    except missing as error:
        raise DataError(
            f"{name} is no dataset that the hub shows you ({_first_line(error)}); mend the name, log in with "
            f"'hf auth login', or name local files: {_LOCAL}"
        ) from error
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        if 'Instruction "eval"' in str(error):  # a split without a row (datasets 5.2, ``arrow_reader.py``)
            raise DataError(
                "data.eval_files: leaves no sample to evaluate on; give files with some, or leave it out"
            ) from error
        cause = error.__cause__ if isinstance(error, library.exceptions.DatasetGenerationError) else None
        raise DataError(f"{name} cannot be loaded ({_first_line(cause or error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@contextlib.contextmanager
def offline_if_unreachable(library: Any, *, told: bool = True) -> Iterator[None]:
    """Where the hub cannot be reached, tell the library so: it then looks into its cache at once.

    By itself it tries six times (datasets 5.2, huggingface_hub 2.4: 25 s for a name that does not resolve).
    """
    constants = importlib.import_module("huggingface_hub").constants
    if constants.HF_HUB_OFFLINE or can_reach(constants.ENDPOINT):
        yield
        return
    if told:
        _log.warning("%s cannot be reached: reading from the cache of the datasets library", constants.ENDPOINT)
    before = library.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = library.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, library.config.HF_HUB_OFFLINE = False, before


# ------------------------------------------------------------------------------------------------------------ documents


@dataclass(frozen=True)
class HfCorpus:
    """Datasets with numbered rows as documents."""

    train: Any
    eval: Any | None
    text_key: str
    eval_fraction: float
    origin: dict[str, str]
    names: tuple[str, str]
    skip_bad: bool = False
    by_name: bool = False

    def _datasets(self) -> list[Any]:
        return [each for each in (self.train, self.eval) if each is not None]

    def content(self, cache: Cache) -> str:
        """Read once; afterwards the library's fingerprints stand for it."""

        def texts(dataset: Any) -> Iterator[str]:
            return (text or "" for text in _texts(dataset, self.text_key, 0, len(dataset)))

        return _content(cache, self._datasets(), ["hf", self.text_key], texts)

    def fingerprint(self, cache: Cache) -> str:
        return digest([_VERSION, self.content(cache), self.eval_fraction, *(["skip"] if self.skip_bad else [])])

    def pieces(self) -> list[CorpusPiece]:
        found: list[CorpusPiece] = []
        for number, dataset in enumerate(self._datasets()):
            share = dataset.data.nbytes / max(1, dataset.data.num_rows)  # bytes of a row
            rows = max(1, int(reading.PIECE / max(1.0, share)))
            for start in range(0, len(dataset), rows):
                stop = min(start + rows, len(dataset))
                found.append(CorpusPiece([number, start, stop], number > 0, int((stop - start) * share)))
        return found

    def read(self, piece: CorpusPiece, damage: Damage) -> Iterator[Document]:
        number, start, stop = piece.parts
        share = piece.num_bytes // max(1, stop - start)
        for row, text in enumerate(_texts(self._datasets()[number], self.text_key, start, stop), start):
            if text:
                yield Document(f"{number}:{row}", text, share)
            elif text is None and self.skip_bad:
                damage.skipped.append(f"row {row} of the {('train', 'eval')[number]} split: {self.text_key!r} is null")
            elif text is None:
                dataset = self._datasets()[number]
                texts = enumerate(_texts(dataset, self.text_key, 0, len(dataset)))
                rows = [row for row, text in texts if text is None]  # all of them in one message
                named = ", ".join(map(str, rows[:20])) + (", ..." if len(rows) > 20 else "")
                raise DataError(
                    f"data.text_key: {self.text_key!r} is null in {len(rows)} rows of the {('train', 'eval')[number]} "
                    f"split ({named}); leave them out with data.on_bad_row=skip"
                )

    def nothing(self) -> DataError:
        rows = len(self.train)
        return DataError(f"data.text_key: no text in column {self.text_key!r} of {rows} rows; name another")


def _content(cache: Cache, datasets: list[Any], rules: list[str], texts: Callable[[Any], Iterator[str]]) -> str:
    """The hash of what ``texts`` reads of datasets, which is remembered by ``rules`` and the library's fingerprints."""

    def hash_of(dataset: Any) -> str:
        state = hashlib.sha256()
        for text in texts(dataset):
            data = text.encode()
            state.update(len(data).to_bytes(8, "little") + data)
        return state.hexdigest()

    # the library's fingerprint alone is equal for files of equal name, size and modification time
    parts = [[each._fingerprint, *(file["filename"] for file in each.cache_files)] for each in datasets]
    stamp = digest([*rules, *parts])
    return str(
        cache.remember_once("content", stamp, lambda: {"content": digest(list(map(hash_of, datasets)))})["content"]
    )


@dataclass(frozen=True)
class Rows:
    """A split as records, numbered from 0 as the library does."""

    dataset: Any
    name: str
    """For messages."""

    @property
    def num_bytes(self) -> int:
        return int(self.dataset.data.nbytes)

    def records(self) -> Iterator[Record]:
        share, number = self.num_bytes // max(1, len(self.dataset)), 0
        for batch in self.dataset.with_format(None).iter(batch_size=256):
            for values in zip(*batch.values(), strict=True):
                row = dict(zip(batch, values, strict=True))
                yield Record(number, without_added(row, self.dataset.features), share)
                number += 1


def without_added(value: Any, feature: Any = None) -> Any:
    """A row of a table, or a part of one, without the None that the type of its column puts where an object lacks a
    key, at every depth. What is of no type (``Json``, from datasets 4.7 on) is as it was written. ``feature``: the
    library's; None where unknown, as of parquet files."""
    if isinstance(value, dict) and (feature is None or isinstance(feature, dict)):
        types = feature or {}
        return {key: without_added(part, types.get(key)) for key, part in value.items() if part is not None}
    if isinstance(value, list) and (feature is None or isinstance(feature, list) or hasattr(feature, "feature")):
        if value and isinstance(value[0], tuple):  # pyarrow's form of a map, whose type adds nothing
            return dict(value)
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [without_added(part, inner) for part in value]
    return value


def rows_of(option: DatasetSettings, cache: Cache) -> tuple[Rows, Rows | None]:
    """The splits of an option as records. Raises DataError."""
    train, held_out = open_datasets(option, cache)
    of_train, of_eval = names_of(option)
    return Rows(train, of_train), None if held_out is None else Rows(held_out, of_eval)


def names_of(option: DatasetSettings) -> tuple[str, str]:
    """What people are told of the splits."""
    name = option.dataset or ", ".join(option.data_files)
    evaluation = "eval" if option.eval_files else option.eval_split
    return f"{name} ({option.train_split})", f"{name} ({evaluation})"


def content_of_rows(cache: Cache, splits: Sequence[Rows]) -> str:
    """The hash of all that the rows hold."""

    def texts(dataset: Any) -> Iterator[str]:
        return (json.dumps(record.value, default=repr) for record in Rows(dataset, "").records())

    return _content(cache, [each.dataset for each in splits], ["rows"], texts)


def _texts(dataset: Any, key: str, start: int, stop: int) -> Iterator[str | None]:
    """Texts of rows, None where there is none."""
    rows = dataset.select(range(start, stop)).with_format("arrow")
    for table in rows.iter(batch_size=1024):
        yield from table.column(key).to_pylist()


def hf_corpus(option: HfSettings, cache: Cache) -> HfCorpus:
    """The documents of an option. Raises DataError."""
    train, evaluation = open_datasets(option, cache)
    fraction = 0.0 if evaluation is not None else option.eval_fraction
    skip_bad = option.on_bad_row == "skip"
    return HfCorpus(train, evaluation, option.text_key, fraction, origin_of(option), names_of(option), skip_bad)


def origin_of(option: DatasetSettings) -> dict[str, str]:
    """What is worth saying in logs of where documents come from."""
    names = {"dataset": option.dataset, "config": option.dataset_config, "revision": option.revision}
    files = {"files": ", ".join(option.data_files)} if option.data_files else {}
    split = f"{option.train_split}, streaming" if option.streaming else option.train_split
    return {key: value for key, value in names.items() if value} | files | {"split": split}


def stream_identity(option: DatasetSettings) -> str:
    """The identity of a stream, whose content was not read yet: names, and sizes of local files."""
    files = [
        [split, os.path.basename(name), os.stat(name).st_size if os.path.isfile(name) else name]
        for split, names in _data_files(option).items()
        for name in names
    ]
    names = [option.dataset, option.dataset_config, option.train_split, option.eval_split, option.revision]
    return digest([_VERSION, names, files, *([option.text_key] if isinstance(option, HfSettings) else [])])
