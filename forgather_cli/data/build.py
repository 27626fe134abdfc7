"""From a data option to what it reads (``source_of``), and to datasets (``load_data``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import DataOption, ModelOption, Target
from forgather_cli.data.cache import Cache, Progress
from forgather_cli.data.splits import CustomSource, DataSource, DataSplits
from forgather_cli.data.text.tokenizer import ByteTokenizer, FileTokenizer
from forgather_cli.errors import DataError


def source_of(option: DataOption, **run: Any) -> DataSource[Any]:
    """What an option reads. ``run``: what other settings of the run say, by the fields of ``DataSource``."""
    make: type[DataSource[Any]] = CustomSource if isinstance(option, Target) else option.load_maker()
    return make(option, **run)


def load_data(option: DataOption, *, progress: Progress | None = None, **run: Any) -> DataSplits:
    """Datasets and tokenizer of a data option; builds the token cache when it is missing.

    ``progress(done, total)`` is called in bytes while a cache is built. ``run``: as of ``source_of``. Raises DataError
    for data or a tokenizer that cannot be used.
    """
    cache = Cache(option.cache_dir, progress)
    made = source_of(option, **run).load(cache)
    return replace(made, files=made.files | cache.files)


def check_own_tokenizer(data: DataOption, model: ModelOption) -> None:
    """Raise DataError where ``bytes`` or ``bpe`` would train a pretrained model on other ids than its tokenizer's."""
    if isinstance(model, Target):
        return
    setting, directory, name = model.directory_setting, model.directory, getattr(data, "tokenizer", None)
    if directory is None or name not in ("bytes", "bpe") or getattr(model, "replace_tokenizer", True):
        return
    path = Path(directory).expanduser()
    if not (path / "tokenizer.json").is_file():
        return
    own, of_bytes = FileTokenizer(path), ByteTokenizer()
    if name == "bytes" and own.vocab_size == of_bytes.vocab_size and own.encode("naïve") == of_bytes.encode("naïve"):
        return  # a model that has learned bytes here
    raise DataError(
        f"data.tokenizer: {name} gives other ids than the tokenizer of model.{setting}={directory}, which its weights "
        "know; leave data.tokenizer out, or set model.replace_tokenizer=true too"
    )
