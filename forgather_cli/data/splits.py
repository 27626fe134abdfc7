"""``DataSource``, which a data option makes, and ``DataSplits``, datasets and tokenizer; and those of custom data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from forgather_cli.config.schema import DataOption, DataTarget, Target
from forgather_cli.data.cache import Cache, digest
from forgather_cli.data.text.corpus import Documents
from forgather_cli.data.text.tokenizer import Tokenizer, has_token, load_tokenizer
from forgather_cli.data.tokens import Tokenized
from forgather_cli.errors import DataError
from forgather_cli.targets import import_target, make


@dataclass(frozen=True)
class DataSplits:
    """What training reads. ``train`` and ``eval`` are datasets for ``TrainLoader``; the shipped ones are map-style."""

    train: Any
    eval: Any | None
    tokenizer: Tokenizer | None
    """None where custom data name none."""
    fingerprint: str
    """Of content, tokenizer, split, seq_len, packing and isolation: equal fingerprints give equal samples."""
    seq_len: int
    """Tokens per sample."""
    description: dict[str, Any] = field(default_factory=dict)
    """Plain values for logs: type, documents, tokens and samples of each split, origin, what was replaced."""
    stated_vocab_size: int | None = None
    """``vocab_size`` as custom data state it."""
    files: dict[str, str] = field(default_factory=dict)
    """Hash of each file that was read, empty where it is not known, by path; none where files are not ours to read."""
    tokenized: Tokenized | None = None
    """The tokens in the cache that samples are cut from; None where there are none."""
    sources: dict[str, tuple[DataOption, DataSplits]] = field(default_factory=dict)
    """Of a mixture by name, whose samples follow each other in this order."""

    @property
    def vocab_size(self) -> int | None:
        """Ids are below it; None where neither a tokenizer nor custom data says."""
        return self.tokenizer.vocab_size if self.tokenizer is not None else self.stated_vocab_size

    @property
    def num_new(self) -> int:
        """Ids at the end of the vocabulary that no model knows yet: tokens that the data added."""
        num_new: int = getattr(self.tokenizer, "num_new", 0)  # a user's tokenizer has what it has
        return num_new

    @property
    def num_known(self) -> int | None:
        """Ids before them; None where there are none."""
        return self.vocab_size - self.num_new if self.vocab_size is not None and self.num_new else None


@dataclass(frozen=True)
class SourceUse:
    """What a run reads of one of several sources, from its beginning to its end."""

    name: str
    sequences: int
    tokens: int
    """With padding."""
    share: float
    """Of the sequences."""
    passes: float
    ends: int | None
    """The step in which it ends; None: it does not."""

    def __str__(self) -> str:
        ends = "" if self.ends is None else f", ends at step {self.ends:,}"
        told = f"{self.sequences:,} sequences ({self.share:.1%}), {self.tokens:,} tokens, {self.passes:.2f} passes"
        return told + ends


_Option = TypeVar("_Option", bound=Any)


@dataclass(frozen=True)
class DataSource(ABC, Generic[_Option]):
    """What a data option reads, for a run whose other settings say the rest. Making it reads nothing, and no method
    but ``load`` imports torch. Without more it has samples of one side and ``seq_len`` tokens, of an unknown number.
    """

    option: _Option
    seed: int = 0
    """Of synthetic data, and of what is shuffled as it is read."""
    model_path: str | None = None
    """The directory of a pretrained model, whose tokenizer is used for custom data that name none."""
    num_sentinels: int = 0
    """Tokens that stand for spans, which an encoder-decoder's data add to the tokenizer."""
    model_tokens: int | None = 0
    """As many as the model knows or can learn, None: any number; ``add_tokens=auto`` of chats adds no more."""
    markers: tuple[str, ...] = ()
    """Tokens of a chat template that its tokenizer gets, since other sources of a mixture have chats."""

    @abstractmethod
    def load(self, cache: Cache) -> DataSplits:
        """Datasets and tokenizer; what is made once is in the cache. Raises DataError."""

    def counts(self) -> dict[str, int | None] | None:
        """For a plan: vocab_size, and tokens and samples of each split (``train_tokens``, ``train_samples``, ...).

        None if the tokens are not cached: nothing is built, no text read. Samples are None where the packing has not
        been computed. Raises DataError when files do not exist.
        """
        return None

    def uses(self, counts: Mapping[str, int | None], steps: int, global_batch: int) -> list[SourceUse]:
        """What a run reads of each of several sources; empty where ``counts`` does not say how many samples they have.
        Warns of one that is read often."""
        return []

    def vocabulary(self) -> tuple[int | None, int]:
        """(tokens of the tokenizer, how many of them chats add to it) where ``counts`` does not say; None: the
        model's."""
        if self.option.tokenizer == "bpe":  # of one that is not trained yet the size it is asked for
            return self.option.bpe_vocab_size, 0
        tokenizer = load_tokenizer(self.option.tokenizer)
        return tokenizer.vocab_size + sum(not has_token(tokenizer, each) for each in self.added()), 0

    def added(self) -> Iterable[str]:
        """Tokens that the tokenizer gets if it lacks them."""
        return ()

    def sides(self) -> tuple[int | None, int]:
        """Tokens of a sample, or of its encoder's side, None where only the data will tell; and of its decoder's, 0
        where it has one side."""
        return self.option.row_tokens, 0

    def text(self, cache: Cache) -> Documents | None:
        """The documents, where they are text that can be read again. Raises DataError."""
        return None

    def origins(self) -> Sequence[Path | str]:
        """The files that records lie in, or the names of splits, by the numbers that the cache has noted."""
        return ()


class CustomSource(DataSource[DataTarget]):
    """Data of the user's."""

    def load(self, cache: Cache) -> DataSplits:
        """Call ``data._target_`` and take what it returns: a DataSplits, a mapping with ``train`` and, if any,
        ``eval``, ``tokenizer`` (a name or an object) or ``vocab_size``, and ``seq_len``, a (train, eval) pair, or a
        training dataset alone. Raises DataError.

        Without ``tokenizer`` and ``vocab_size`` the tokenizer is that of the model's directory, if there is one.
        """
        option = self.option
        made = make(import_target(option.path, "data"), "data", option.path, **option.kwargs)
        if not isinstance(made, DataSplits):
            made = _splits_of(option, made, self.model_path)
        _check_dispatch(option, made)
        return made

    def vocabulary(self) -> tuple[None, int]:
        return None, 0

    def sides(self) -> tuple[int | None, int]:
        length = self.option.kwargs.get("seq_len")
        return length if isinstance(length, int) else None, 0


def _splits_of(option: Target, made: Any, model_path: str | None) -> DataSplits:
    parts: dict[str, Any] = {"train": made}
    if isinstance(made, Mapping):
        parts = dict(made)
    elif isinstance(made, tuple) and len(made) == 2:
        parts = {"train": made[0], "eval": made[1]}
    if "train" not in parts:
        raise DataError(
            f"data._target_: {option.path} returned a mapping without 'train' (its keys: {', '.join(parts)})"
        )
    tokenizer, vocab_size = parts.get("tokenizer"), parts.get("vocab_size")
    if vocab_size is not None and (not isinstance(vocab_size, int) or vocab_size < 1):
        raise DataError(f"data._target_: 'vocab_size' of {option.path} must be a number above 0, got {vocab_size!r}")
    if tokenizer is None and vocab_size is None and model_path is not None:
        directory = Path(model_path).expanduser()
        tokenizer = str(directory) if (directory / "tokenizer.json").is_file() else None
    try:
        seq_len = int(parts["seq_len"]) if "seq_len" in parts else len(parts["train"][0]["input_ids"])
    except (TypeError, KeyError, IndexError, NotImplementedError) as error:
        raise DataError(
            f"data._target_: cannot tell the sequence length of what {option.path} returned; "
            f"return a mapping with 'train' and 'seq_len'"
        ) from error
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    fingerprint = digest([option.path, repr(sorted(option.kwargs.items()))])
    description = {"type": option.path}
    return DataSplits(parts["train"], parts.get("eval"), tokenizer, fingerprint, seq_len, description, vocab_size)


def _check_dispatch(option: DataTarget, made: DataSplits) -> None:
    """Raise DataError for settings of iterable data that are given for map-style data."""
    from forgather_cli.data.loaders.map_style import is_map_style  # here, since it costs torch

    splits = {"train": made.train, "eval": made.eval}
    streams = {name: data is not None and not is_map_style(data) for name, data in splits.items()}
    follows = option.dispatch_eval_batches is None
    reads = {
        "dispatch_batches": streams["train"] or (follows and streams["eval"]),
        "dispatch_eval_batches": streams["eval"],
    }
    for name, is_read in reads.items():
        if getattr(option, name) is not None and not is_read:
            raise DataError(
                f"data.{name}: nothing reads it, since what {option.path} returned has numbers, by which each rank "
                "reads its own samples; leave it out"
            )
