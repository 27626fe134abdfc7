"""Options of the group ``data``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import BeforeValidator, ConfigDict, Tag

from forgather_cli.config.schema.base import Count, Fraction, PositiveInt, Target, by_type, settings


@settings
class _DataBase:
    tokenizer: str = "bytes"  # bytes, bpe, or a directory with tokenizer.json
    bpe_vocab_size: Annotated[int, Ge(258)] = 4096
    seq_len: Annotated[int, Ge(2)] = 256  # tokens
    packing: Literal["concat", "best_fit", "pad"] = "concat"
    isolate_documents: bool = False
    cache_dir: str | None = None  # null: $XDG_CACHE_HOME/forgather or ~/.cache/forgather
    dispatch_batches: bool | None = None  # iterable data: null: true, rank 0 reads and sends; false: each its shard
    dispatch_eval_batches: bool | None = None  # null: as dispatch_batches


OnBadRow = Literal["error", "skip"]


@settings
class _Tokenized(_DataBase):
    tokenize_processes: PositiveInt | None = None  # at once; null: the cores, where there is enough to do


@settings
class PythonStdlibSettings(_Tokenized):
    """Sources of the running interpreter's standard library."""

    type: Literal["python_stdlib"] = "python_stdlib"
    eval_fraction: Fraction = 0.05  # of the files


@settings
class TextSettings(_Tokenized):
    """Local text: txt, md, jsonl, parquet; plain or compressed."""

    type: Literal["text"] = "text"
    files: list[str]
    eval_files: list[str] = field(default_factory=list)  # empty: eval_fraction of the documents
    text_key: str = "text"
    on_bad_row: OnBadRow = "error"  # a row without text; skip: it is left out and counted
    eval_fraction: Fraction = 0.05  # of the documents


@settings
class HfSettings(_Tokenized):
    """The ``datasets`` library: a dataset of the hub, local files, or a directory."""

    type: Literal["hf"] = "hf"
    dataset: str | None = None  # a name on the hub, a directory, or a format of data_files; null: by their suffix
    dataset_config: str | None = None  # of a dataset with several configurations
    train_split: str = "train"
    eval_split: str | None = None  # null: eval_fraction of the documents, unless streaming
    data_files: list[str] = field(default_factory=list)
    eval_files: list[str] = field(default_factory=list)  # in the format of data_files
    revision: str | None = None  # branch, tag or commit on the hub
    text_key: str = "text"
    on_bad_row: OnBadRow = "error"  # a row without text; skip: it is left out and counted
    eval_fraction: Fraction = 0.05  # of the documents
    streaming: bool = False
    shuffle_buffer: Count = 0  # documents; 0: in the order of the dataset


@settings
class TokensSettings(_DataBase):
    """Pre-tokenized memory maps."""

    type: Literal["tokens"] = "tokens"
    files: list[str]
    eval_files: list[str] = field(default_factory=list)
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"  # of .bin files; .npy say their own
    document_separator: int | None = None  # token id that ends a document
    eval_fraction: Fraction = 0.05  # of the tokens, from the end


@settings
class InstructSettings(_DataBase):
    """Conversations: jsonl, json, parquet; targets are the assistant's turns."""

    type: Literal["instruct"] = "instruct"
    files: list[str]
    eval_files: list[str] = field(default_factory=list)  # empty: eval_fraction of the conversations
    eval_fraction: Fraction = 0.05  # of the conversations
    on_bad_row: OnBadRow = "error"  # a record that is no conversation; skip: it is left out and counted
    messages_key: str | None = None  # null: messages, conversations, or prompt and completion
    chat_template: str | None = None  # a file, or chatml; null: the tokenizer directory's
    train_on: Literal["assistant", "last", "all"] = "assistant"
    too_long: Literal["cut", "drop"] = "cut"  # conversations longer than seq_len
    packing: Literal["concat", "best_fit", "pad"] = "best_fit"
    isolate_documents: bool = True


@settings
class SyntheticSettings(_DataBase):
    """Random tokens made on the fly, for benchmarks and tests."""

    type: Literal["synthetic"] = "synthetic"
    num_samples: PositiveInt = 100_000
    num_eval_samples: Count = 64
    ragged: bool = False  # sequences of random length, padded, padding without targets


@dataclass(frozen=True)
class DataTarget(Target):
    """Data of the user's. How ranks share what it returns stands beside ``_target_`` and is not passed to it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    dispatch_batches: bool | None = None
    dispatch_eval_batches: bool | None = None


def _to_data_target(value: Any) -> Any:
    if not (isinstance(value, dict) and "_target_" in value):
        return value
    own = {key: value[key] for key in ("dispatch_batches", "dispatch_eval_batches") if key in value}
    kwargs = {key: item for key, item in value.items() if key not in own and key != "_target_"}
    return {"path": value["_target_"], "kwargs": kwargs, **own}


DataOption = Annotated[
    Annotated[PythonStdlibSettings, Tag("python_stdlib")]
    | Annotated[TextSettings, Tag("text")]
    | Annotated[HfSettings, Tag("hf")]
    | Annotated[TokensSettings, Tag("tokens")]
    | Annotated[InstructSettings, Tag("instruct")]
    | Annotated[SyntheticSettings, Tag("synthetic")]
    | Annotated[DataTarget, BeforeValidator(_to_data_target), Tag("_target_")],
    by_type,
]
