"""Options of the group ``data`` whose examples have two sides, for encoder-decoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from forgather_cli.config.schema.base import (
    Count,
    FilePath,
    Fraction,
    PositiveFloat,
    PositiveInt,
    Settings,
    Target,
    Void,
    only_if,
    settings,
)
from forgather_cli.config.schema.data import (
    OF_RECORDS,
    WITHOUT_EVAL_FILES,
    DataSettings,
    HfSettings,
    OnBadRow,
    PythonStdlibSettings,
    TextSettings,
)

_PACKED = only_if(".packing", "best_fit")


@settings
class PairedSettings(DataSettings):
    """Data whose examples have two sides."""

    max_encoder_length: Annotated[int, Ge(2)] = 4096  # tokens of one example's source at most
    max_decoder_length: Annotated[int, Ge(2)] = 2048  # tokens of one example's target at most
    packing: Literal["best_fit", "pad"] = "best_fit"  # best_fit (several examples in a row, kept apart), pad (one each)
    # tokens of a packed row's encoder side; null: max_encoder_length, data=ul2: twice that
    pack_encoder: Annotated[PositiveInt | None, _PACKED] = None
    # tokens of its decoder side; null: as the examples fill it
    pack_decoder: Annotated[PositiveInt | None, _PACKED] = None

    is_paired: ClassVar[bool | None] = True

    @property
    def seq_len(self) -> int:
        """The longest side of an example, in tokens."""
        return max(self.max_encoder_length, self.max_decoder_length)

    def problems(self, config: Any) -> Iterator[str]:
        for name, most in (("encoder", self.max_encoder_length), ("decoder", self.max_decoder_length)):
            pack = getattr(self, f"pack_{name}")
            if pack is not None and pack < most:
                yield (
                    f"pack_{name}: must hold an example of max_{name}_length={most} tokens, got {pack}; raise it, or "
                    f"lower max_{name}_length"
                )
        if not isinstance(config.model, Target) and config.model.is_encoder_decoder is False:
            yield (
                f"model: data={config.data.type} has examples of two sides, got model={config.model.type}, which reads "
                "one; choose model=qwen3_encdec"
            )


@settings
class DenoiserSettings(Settings):
    """How a window of text becomes an example."""

    name: str
    prefix: str  # the token that the source begins with
    mean_span: Annotated[float, Ge(1)] | None = None  # tokens of a masked span; null: the rest after a prefix
    corruption: Fraction | None = None  # share of the tokens that is masked, on average; null: 0.15, after a prefix 0.5
    weight: PositiveFloat = 1.0

    @property
    def share(self) -> float:
        """``corruption`` with its default."""
        if self.corruption is not None:
            return self.corruption
        return 0.5 if self.mean_span is None else 0.15


def _spans(letter: str, prefix: str, span: float, corruption: float) -> DenoiserSettings:
    name = f"{letter}_{span:g}_{round(100 * corruption)}"
    return DenoiserSettings(name=name, prefix=prefix, mean_span=span, corruption=corruption)


MIXTURES: dict[str, tuple[DenoiserSettings, ...]] = {
    "r_x_s": (
        _spans("R", "[R]", 3, 0.15),
        _spans("R", "[R]", 12, 0.5),
        _spans("X", "[X]", 32, 0.15),
        _spans("X", "[X]", 32, 0.5),
        DenoiserSettings(name="S", prefix="[S]", weight=4.0),
    ),
    # the seven of the paper (arXiv:2205.05131), with the tokens of its models; S, its prefix language model, is cut as
    # that of r_x_s
    "ul2": (
        _spans("R", "[NLU]", 3, 0.15),
        _spans("R", "[NLU]", 8, 0.15),
        DenoiserSettings(name="S", prefix="[S2S]"),
        _spans("X", "[NLG]", 3, 0.5),
        _spans("X", "[NLG]", 8, 0.5),
        _spans("X", "[NLG]", 64, 0.15),
        _spans("X", "[NLG]", 64, 0.5),
    ),
}


@settings
class Ul2Settings(PairedSettings):
    """Text of which a part is to be restored, by a mixture of denoisers (UL2); for model=qwen3_encdec."""

    maker: ClassVar[str] = "forgather_cli.data.paired.source:Ul2Source"

    type: Literal["ul2"] = "ul2"
    # where the text is from: python_stdlib, text (files) or hf (the datasets library)
    source: Literal["python_stdlib", "text", "hf"] = "python_stdlib"
    # source=text: list of paths and globs
    files: Annotated[list[FilePath], only_if(".source", "text")] = field(default_factory=list)
    # source=hf: name on the hub, directory, or format of data_files
    dataset: Annotated[FilePath | None, only_if(".source", "hf")] = None
    # source=hf: configuration (subset) of a dataset that has several
    dataset_config: Annotated[str | None, only_if(".source", "hf")] = None
    train_split: Annotated[str, only_if(".source", "hf")] = "train"  # source=hf: split to train on
    # source=hf: split to evaluate on; null: eval_fraction, or with streaming nothing
    eval_split: Annotated[str | None, only_if(".source", "hf")] = None
    # source=hf: list of paths and globs, or URLs, instead of those of the dataset
    data_files: Annotated[list[FilePath], only_if(".source", "hf")] = field(default_factory=list)
    # source=hf: branch, tag or commit on the hub; null: main
    revision: Annotated[str | None, only_if(".source", "hf")] = None
    # source=hf; true: read, tokenized, denoised and packed while training; nothing is stored
    streaming: Annotated[bool, only_if(".source", "hf")] = False
    shuffle_buffer: Annotated[Count, only_if(".streaming", True)] = 0
    # source=text and hf: paths and globs to evaluate on; empty: eval_fraction of the documents
    eval_files: Annotated[list[FilePath], only_if(".source", "text", "hf")] = field(default_factory=list)
    eval_fraction: Annotated[
        Fraction,
        WITHOUT_EVAL_FILES,
        only_if(".streaming", False, remedy="set data.eval_split or data.eval_files"),
        only_if(".eval_split", None, remedy="leave eval_split out"),
    ] = 0.05  # fraction of the documents that is held out; not with streaming
    # source=text and hf: field or column that holds the text
    text_key: Annotated[str, only_if(".source", "text", "hf"), OF_RECORDS] = "text"
    # source=text and hf: broken rows, rows without text: error, or skip (left out, counted)
    on_bad_row: Annotated[OnBadRow, only_if(".source", "text", "hf")] = "error"
    tokenize_processes: Annotated[PositiveInt | None, only_if(".streaming", False)] = None
    # tokens of a window, which its denoiser cuts into equal pieces, an example each
    max_seq_length: Annotated[int, Ge(8)] = 8192
    # r_x_s (5 denoisers), ul2 (the paper's 7); S: a prefix of 20 to 80 %, the rest asked for
    mixture: Literal["r_x_s", "ul2"] = "r_x_s"
    # a number for each denoiser of the mixture; null: 1 1 1 1 4 of r_x_s, equal ones of ul2
    ul2_task_weights: list[PositiveFloat] | None = None
    # list of {name, prefix, mean_span, corruption, weight} instead of a mixture; mean_span null: prefix language model,
    # corruption the mean share after the prefix (0.5)
    denoisers: list[DenoiserSettings] = field(default_factory=list)
    block_windows: PositiveInt = 512  # windows whose examples are packed together

    @property
    def is_stream(self) -> bool:
        return True

    @property
    def nothing_held_out(self) -> Void | None:
        return self.text().nothing_held_out

    def mixture_of(self) -> list[DenoiserSettings]:
        """The denoisers with their weights."""
        found = self.denoisers or MIXTURES[self.mixture]
        weights = self.ul2_task_weights or [each.weight for each in found]
        return [replace(each, weight=weight) for each, weight in zip(found, weights, strict=True)]

    def text(self) -> PythonStdlibSettings | TextSettings | HfSettings:
        """The option that reads the text, cut into windows one after the other."""
        common: dict[str, Any] = {
            "tokenizer": self.tokenizer, "bpe_vocab_size": self.bpe_vocab_size, "cache_dir": self.cache_dir,
            "seq_len": self.max_seq_length, "tokenize_processes": self.tokenize_processes,
            "eval_fraction": self.eval_fraction, "add_bos": False,
        }  # fmt: skip
        if self.source == "python_stdlib":
            return PythonStdlibSettings(**common)
        common |= {"eval_files": self.eval_files, "text_key": self.text_key, "on_bad_row": self.on_bad_row}
        if self.source == "text":
            return TextSettings(**common, files=self.files)
        names = ("dataset", "dataset_config", "train_split", "eval_split", "data_files", "revision", "streaming")
        hub = {name: getattr(self, name) for name in (*names, "shuffle_buffer")}
        return HfSettings(**common, **hub)

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.source == "text" and not self.files:
            yield "files: data.source=text reads files, got none; set data.files=[texts/*.txt]"
        if self.source == "hf":
            yield from self.text().problems(config)
        denoisers, weights = self.denoisers or MIXTURES[self.mixture], self.ul2_task_weights
        if weights is not None and len(weights) != len(denoisers):
            names = ", ".join(each.name for each in denoisers)
            yield f"ul2_task_weights: must be one for each of {names}, got {len(weights)}; give {len(denoisers)}"
        if len({each.name for each in denoisers}) < len(denoisers):
            yield f"denoisers: names must differ, got {', '.join(each.name for each in denoisers)}; rename one"


@settings
class Seq2SeqSettings(PairedSettings):
    """Pairs of a source and a target in jsonl, json, csv, tsv and parquet files; for model=qwen3_encdec."""

    maker: ClassVar[str] = "forgather_cli.data.paired.source:PairSource"

    type: Literal["seq2seq"] = "seq2seq"
    files: list[FilePath]
    # list of paths and globs to evaluate on; empty: eval_fraction of the pairs
    eval_files: list[FilePath] = field(default_factory=list)
    eval_fraction: Annotated[Fraction, WITHOUT_EVAL_FILES] = 0.05  # fraction of the pairs that is held out
    on_bad_row: OnBadRow = "error"  # records that are no pair of texts: error, or skip (left out and counted)
    max_encoder_length: Annotated[int, Ge(2)] = 512  # tokens of a source at most
    max_decoder_length: Annotated[int, Ge(2)] = 512  # tokens of a target at most
    input_key: str = "input"  # field of a record that holds the source
    target_key: str = "target"  # field of a record that holds the target
    # sides longer than max_encoder_length and max_decoder_length: cut, or drop the pair
    too_long: Literal["cut", "drop"] = "cut"
