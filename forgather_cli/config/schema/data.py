"""Options of the group ``data``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from glob import glob
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from annotated_types import Ge
from pydantic import AfterValidator, ConfigDict

from forgather_cli.config.schema.base import (
    Count,
    FilePath,
    Fraction,
    OnlyIf,
    Option,
    PositiveInt,
    Target,
    Void,
    by_type,
    only_if,
    only_where,
    settings,
)
from forgather_cli.config.schema.trainer import NEEDS_RANKS
from forgather_cli.documents.regular_files import GIVE_RECORDS, RECORDS


def _undispatched(config: Any, owner: DataSettings | DataTarget) -> Void | None:
    """Ranks read data that has numbers by these; one rank has nobody to share other data with."""
    if not owner.is_stream:
        streams = "data._target_, or data=hf with streaming=true"
        return Void("data", f"ranks read its samples by number; give iterable data ({streams})")
    return NEEDS_RANKS.void(config, owner)


WITHOUT_EVAL_FILES = only_where(".eval_files", lambda files: not files, "leave eval_files out")
_CACHED = only_if(".streaming", False)
OF_DIRECTORY = only_where(".tokenizer", lambda name: name not in ("bytes", "bpe"), "set data.tokenizer=DIR")


@settings
class DataSettings(Option):
    """What all data have: the base of every option of the group ``data``.

    ``maker`` names a class below ``data.splits.DataSource``. It is made with the option and what the run's other
    settings say, and has what others ask: ``load`` (datasets and tokenizer), ``text`` (the documents), ``origins``
    (what these lie in), and for a plan ``vocabulary``, ``sides``, ``counts``. ``data.sources.TextSource`` has all
    but ``text``; its options are below ``CorpusSettings``. The properties here are fields where an option has them.
    """

    # bytes, a directory, bpe (trained on text); null: the model's, tokenizer_default or bytes
    tokenizer: FilePath = field(default="bytes", metadata={"file": None})
    # tokens in the vocabulary that tokenizer=bpe trains, at least 258
    bpe_vocab_size: Annotated[int, Ge(258), only_if(".tokenizer", "bpe")] = 4096
    cache_dir: FilePath | None = None  # token caches; null: $XDG_CACHE_HOME/forgather or ~/.cache/forgather
    # iterable data, several ranks: null, true: rank 0 reads and sends; false: each its shard
    dispatch_batches: Annotated[bool | None, OnlyIf(_undispatched)] = None
    # the same for evaluation; null: as dispatch_batches
    dispatch_eval_batches: Annotated[bool | None, OnlyIf(_undispatched)] = None

    is_paired: ClassVar[bool | None] = False
    """Whether its examples have two sides, for an encoder-decoder; it then has the fields of ``PairedSettings``. None
    where only the user knows."""
    is_chats: ClassVar[bool] = False
    """Whether its documents are chats, trained on in part; it then has the fields of ``InstructSettings``."""
    has_pairs: ClassVar[bool] = False
    """Whether its rows hold pairs of a chosen and a rejected side, for ``loss=dpo``, each as long as ``seq_len``."""
    add_tokens = cast(Literal["auto"] | bool, False)
    """Whether it gives its tokenizer tokens that the model is to learn."""
    template_date = cast(str | None, "")
    """The day that a chat template writes, None: that of the run's first start; empty where none does."""

    @property
    def seq_len(self) -> int:
        """The longest sample in tokens; of examples of two sides the longer one."""
        raise NotImplementedError

    @property
    def row_tokens(self) -> int:
        """Tokens of a row of one stack."""
        return self.seq_len * (2 if self.has_pairs else 1)

    @property
    def is_stream(self) -> bool:
        """Ranks cannot read the data by the numbers of its samples, or it is the user's and may be so."""
        return False

    @property
    def nothing_held_out(self) -> Void | None:
        """The setting that leaves nothing to evaluate on; None if there is something."""
        held_out = getattr(self, "eval_files", None) or getattr(self, "eval_fraction", None)
        return None if held_out else Void("data.eval_fraction", "set eval_fraction=0.05")


@settings
class SequenceSettings(DataSettings):
    """Data whose samples are cut from documents, or made of them, and have one length."""

    seq_len: Annotated[int, Ge(2)] = 256  # tokens per sequence
    # concat (cut the stream of documents), best_fit (whole documents), pad (one document each)
    packing: Literal["concat", "best_fit", "pad"] = "concat"
    isolate_documents: bool = False  # true: attention and targets stop at document borders
    # of a tokenizer directory: a begin token before documents and prompts; null: its own rule
    add_bos: Annotated[bool | None, OF_DIRECTORY] = None


def _files_of_text(config: Any, owner: Any) -> Void | None:
    """Where all files are plain text, which has no field."""
    patterns = [*owner.files, *owner.eval_files]
    names = [Path(name.lower()) for each in patterns for name in glob(each, recursive=True) or [each]]
    has_records = any(suffix in RECORDS for name in names for suffix in name.suffixes)
    return None if has_records or not owner.files else Void(".files", GIVE_RECORDS)


OF_RECORDS = OnlyIf(_files_of_text)
OnBadRow = Literal["error", "skip"]
Day = Annotated[str, AfterValidator(lambda text: datetime.fromisoformat(text) and text)]


@settings
class CorpusSettings(SequenceSettings):
    """Text, which is tokenized once, into the cache."""

    # processes that tokenize at once; null: the cores, for more than 64 MiB of text
    tokenize_processes: PositiveInt | None = None


@settings
class PythonStdlibSettings(CorpusSettings):
    """Sources of the running interpreter's standard library, about 11 MB; nothing to download."""

    maker: ClassVar[str] = "forgather_cli.data.sources:FilesSource"

    type: Literal["python_stdlib"] = "python_stdlib"
    eval_fraction: Fraction = 0.05  # fraction of the documents that is held out


@settings
class TextSettings(CorpusSettings):
    """Local text: txt, md, jsonl, json, csv, tsv (plain, gz, bz2, xz or zst) and parquet files."""

    maker: ClassVar[str] = "forgather_cli.data.sources:FilesSource"

    type: Literal["text"] = "text"
    files: list[FilePath]  # list of paths and globs, plain or compressed (gz, bz2, xz, zst)
    # list of paths and globs to evaluate on; empty: eval_fraction of the documents
    eval_files: list[FilePath] = field(default_factory=list)
    # field or column of the records that holds the text; not beside txt and md alone
    text_key: Annotated[str, OF_RECORDS] = "text"
    on_bad_row: OnBadRow = "error"  # broken rows and rows without text: error, or skip (left out and counted)
    eval_fraction: Annotated[Fraction, WITHOUT_EVAL_FILES] = 0.05


def _beside_files(config: Any, owner: Any) -> Void | None:
    """Files that are read without the library leave nothing to the settings of a dataset."""
    return Void(".files", "leave files out") if getattr(owner, "files", None) else None


_OF_DATASET = OnlyIf(_beside_files)


@settings
class DatasetSettings(SequenceSettings):
    """What the ``datasets`` library reads: a dataset of the hub, local files, or a directory."""

    # name on the hub, directory (of save_to_disk, or of data files), or format of data_files
    dataset: Annotated[FilePath | None, _OF_DATASET] = None
    dataset_config: Annotated[str | None, _OF_DATASET] = None  # configuration (subset) of a dataset that has several
    # split to train on; without streaming also a slice, as train[:10%]
    train_split: Annotated[str, _OF_DATASET] = "train"
    # split to evaluate on; null: eval_fraction, or with streaming nothing
    eval_split: Annotated[str | None, _OF_DATASET] = None
    # list of paths and globs, or URLs, instead of those of the dataset
    data_files: Annotated[list[FilePath], _OF_DATASET] = field(default_factory=list)
    # list of paths and globs to evaluate on, in the format of those to train on
    eval_files: list[FilePath] = field(default_factory=list)
    revision: Annotated[str | None, _OF_DATASET] = None  # branch, tag or commit on the hub; null: main
    eval_fraction: Annotated[
        Fraction,
        only_if(".streaming", False, remedy="set data.eval_split or data.eval_files"),
        only_if(".eval_split", None, remedy="leave eval_split out"),
        WITHOUT_EVAL_FILES,
    ] = 0.05  # fraction of the documents or conversations that is held out; not with streaming
    # true: read, tokenized and packed while training, from the hub too; nothing is stored
    streaming: Annotated[bool, _OF_DATASET] = False
    # streaming: documents or conversations shuffled at once; 0: the order of the dataset
    shuffle_buffer: Annotated[Count, only_if(".streaming", True)] = 0
    cache_dir: Annotated[FilePath | None, _CACHED] = None

    @property
    def is_stream(self) -> bool:
        return self.streaming

    @property
    def nothing_held_out(self) -> Void | None:
        if self.eval_split:
            return None
        if self.streaming and not self.eval_files:
            return Void("data.streaming", "set data.eval_split or data.eval_files")
        return super().nothing_held_out

    def problems(self, config: Any) -> Iterator[str]:
        if self.eval_files and self.eval_split:
            yield "eval_split: eval_files are evaluated on already; set one of the two"
        for name, split in (("train_split", self.train_split), ("eval_split", self.eval_split or "")):
            if self.streaming and set(split) & set("[+"):
                yield f"{name}: a stream is read from its beginning to its end, got {split!r}; name a whole split"


@settings
class HfSettings(DatasetSettings, CorpusSettings):
    """The datasets library: a dataset of the hub, local json, parquet, arrow, csv or text, or a directory."""

    maker: ClassVar[str] = "forgather_cli.data.sources:HfSource"

    type: Literal["hf"] = "hf"
    text_key: str = "text"  # column that holds the text
    on_bad_row: OnBadRow = "error"
    tokenize_processes: Annotated[PositiveInt | None, _CACHED] = None

    def problems(self, config: Any) -> Iterator[str]:
        if self.dataset is None and not self.data_files:
            yield (
                "dataset: data=hf reads a dataset of the hub, a directory or data_files, got none; "
                "set data.dataset=user/name or data.data_files=[texts/*.jsonl]"
            )
        if self.eval_files and not self.data_files:
            yield "eval_files: go with data_files, got none of those; set data_files too, or eval_split"
        if self.streaming and self.tokenizer == "bpe":
            yield (
                "tokenizer: bpe is trained on a whole corpus before training begins, which streaming=true does not "
                "read; set tokenizer=bytes or a directory, or streaming=false"
            )
        yield from super().problems(config)


@settings
class TokensSettings(SequenceSettings):
    """Pre-tokenized memory maps: .bin (raw token ids) and .npy files."""

    maker: ClassVar[str] = "forgather_cli.data.sources:TokenFilesSource"

    type: Literal["tokens"] = "tokens"
    files: list[FilePath]  # list of paths and globs
    # list of paths and globs to evaluate on; empty: eval_fraction of the tokens, from the end
    eval_files: list[FilePath] = field(default_factory=list)
    # of .bin files: uint16, uint32, int32, int64; null: uint16, refused where they look wider; .npy files say their own
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    document_separator: int | None = None  # token id that ends a document; null: no borders known
    eval_fraction: Annotated[Fraction, WITHOUT_EVAL_FILES] = 0.05  # fraction of the tokens that is held out


ChatKey = Literal[
    "system", "user", "assistant", "messages", "conversations", "prompt", "completion", "instruction", "input",
    "context", "history", "output", "response", "question", "answer", "reasoning_content", "tools", "text",
]  # fmt: skip
"""What a key of a chat record can be read as."""


@settings
class InstructSettings(DatasetSettings):
    """Chats in jsonl, json, csv, tsv and parquet files, or of the datasets library; loss on the assistant's turns."""

    maker: ClassVar[str] = "forgather_cli.data.sources:ChatSource"
    is_chats: ClassVar[bool] = True
    noun: ClassVar[str] = "conversation"

    type: Literal["instruct"] = "instruct"
    # list of paths and globs, plain or compressed (gz, bz2, xz, zst); or a dataset:
    files: list[FilePath] = field(default_factory=list)
    on_bad_row: OnBadRow = "error"  # records that are no conversation: error, or skip (left out and counted)
    # field with the list of messages; null: messages, conversations, or prompt and completion
    messages_key: str | None = None
    # other layouts: key of the records: system, user, assistant, or a key of a known layout
    mapping: dict[str, ChatKey] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)  # keys of the records that are left out, as if they were not there
    chat_template: FilePath | None = None  # file with a Jinja template, or chatml; null: the tokenizer directory's own
    # YYYY-MM-DD, the day that a template writes (strftime_now); null: on which the run begins
    template_date: Day | None = None
    # the template's markers without a token: auto (added if learnable), true, false (text)
    add_tokens: Literal["auto"] | bool = "auto"
    # targets: assistant (its turns), last (its last turn), all (every token)
    train_on: Literal["assistant", "last", "all"] = "assistant"
    # conversations longer than seq_len: cut (keep the first seq_len tokens), drop
    too_long: Literal["cut", "drop"] = "cut"
    # best_fit (whole conversations), pad (one each), concat (cut where a sequence ends)
    packing: Literal["concat", "best_fit", "pad"] = "best_fit"
    isolate_documents: bool = True  # attention, targets and positions stop at the borders of conversations

    def problems(self, config: Any) -> Iterator[str]:
        if not self.files and self.dataset is None and not self.data_files:
            yield (
                f"files: data={self.type} reads files, or a dataset of the datasets library, got none; set "
                "data.files=[chats.jsonl], data.dataset=user/name or data.data_files=[chats/*.jsonl]"
            )
        if self.eval_files and not (self.files or self.data_files):
            yield "eval_files: go with files or data_files, got none of those; set them too, or eval_split"
        if self.streaming and self.packing == "best_fit":
            yield (
                "packing: best_fit is found over all conversations, which streaming=true does not know, got best_fit; "
                "set packing=concat or pad, or streaming=false"
            )
        yield from super().problems(config)
        if both := [key for key in self.mapping if key in self.ignore]:
            yield f"data.ignore: {both[0]!r} is in data.mapping too, which reads it; leave it out of one of the two"


@settings
class SyntheticSettings(SequenceSettings):
    """Random tokens made on the fly, for benchmarks and tests."""

    maker: ClassVar[str] = "forgather_cli.data.sources:SyntheticSource"

    type: Literal["synthetic"] = "synthetic"
    num_samples: PositiveInt = 100_000  # training sequences
    num_eval_samples: Count = 64  # evaluation sequences
    ragged: bool = False  # true: sequences of random length, padded; padding has no targets

    @property
    def nothing_held_out(self) -> Void | None:
        return None if self.num_eval_samples else Void("data.num_eval_samples", "set num_eval_samples=64")


@dataclass(frozen=True)
class DataTarget(Target):
    """Data of the user's. How ranks share what it returns stands beside ``_target_`` and is not passed to it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    dispatch_batches: Annotated[bool | None, OnlyIf(_undispatched)] = None
    dispatch_eval_batches: Annotated[bool | None, OnlyIf(_undispatched)] = None

    is_stream: ClassVar[bool] = True
    is_chats: ClassVar[bool] = False
    is_paired: ClassVar[bool | None] = None
    has_pairs: ClassVar[bool] = False
    cache_dir: ClassVar[str | None] = None
    add_tokens: ClassVar[bool] = False
    template_date: ClassVar[str] = ""
    nothing_held_out: ClassVar[Void | None] = None


DataOption = Annotated[DataSettings | DataTarget, by_type]
