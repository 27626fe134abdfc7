"""What ``forgather finalize`` is asked for. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from forgather_cli.config.schema import QuantizeRecipe
from forgather_cli.documents.regular_files import read_text
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.gguf.options import GGUF_TYPES, MAX_RATIO, GgufType

DtypeName = Literal["fp32", "bf16", "fp16"]
LOGIT_BOUND = 1e-4
"""How far a logit of an unquantized result may be from the source's."""
MERGE_BOUND = 1.01
"""How many times the perplexity of base and adapter the model that they are merged into may have."""
PERPLEXITY_BOUND = 1.10
"""How many times the source's perplexity a quantized result may have."""


@dataclass(frozen=True)
class FinalizeOptions:
    """The options of the command; None: not given."""

    best: bool = False
    average: int | None = None
    merge: bool = False
    dtype: DtypeName | None = None
    add_tokens: Path | None = None
    chat_template: Path | None = None
    quantize: QuantizeRecipe | None = None
    gguf: str | None = None
    """Types with commas between them."""
    max_ratio: float | None = None
    """Of a GGUF file's perplexity and the source's."""
    max_divergence: float | None = None
    text: Path | None = None
    trust_config: bool = False
    """Whether data that the run's saved config names by ``_target_`` may be loaded."""

    def __post_init__(self) -> None:
        """Raise ConfigError with all that is not there or contradicts itself."""
        problems = []
        dtypes, recipes = get_args(DtypeName), get_args(QuantizeRecipe)
        if self.dtype is not None and self.dtype not in dtypes:
            problems.append(f"--dtype: must be {', '.join(dtypes[:-1])} or {dtypes[-1]}, got {self.dtype!r}")
        if self.quantize is not None and self.quantize not in recipes:
            problems.append(f"--quantize: must be one of {', '.join(recipes)}, got {self.quantize!r}")
        try:
            types = self.gguf_types
        except ValueError as error:
            problems.append(
                f"--gguf: must be {', '.join(GGUF_TYPES)}, or several with commas between them, got {error}"
            )
        else:
            if types and self.quantize is not None:
                problems.append("--gguf: is written from plain weights, and --quantize rounds them; leave one out")
            if self.max_ratio is not None and not MAX_RATIO.keys() & set(types):
                problems.append(f"--max-ratio: bounds files of --gguf {', '.join(MAX_RATIO)}, and none is asked for")
        if self.max_ratio is not None and not self.max_ratio >= 1:
            problems.append(f"--max-ratio: must be at least 1, got {self.max_ratio:g}")
        if self.best and self.average is not None:
            problems.append("--best: excludes --average; leave one out")
        if self.average is not None and self.average < 2:
            problems.append(
                f"--average: must be 2 or more, got {self.average}; leave it out for the newest checkpoint alone"
            )
        if self.max_divergence is not None and not self.max_divergence > 0:
            problems.append(f"--max-divergence: must be above 0, got {self.max_divergence:g}")
        elif self.quantize is not None and self.max_divergence is not None and self.max_divergence < 1:
            problems.append(
                f"--max-divergence: with --quantize it is the largest ratio of the perplexities, so at least 1, got "
                f"{self.max_divergence:g}"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def gguf_types(self) -> tuple[GgufType, ...]:
        """Of the GGUF files to write, in order. Raises ValueError with what is none."""
        given = [] if self.gguf is None else self.gguf.split(",")
        for name in given:
            if name not in GGUF_TYPES:
                raise ValueError(repr(name))
        return tuple(dict.fromkeys(cast("list[GgufType]", given)))

    @property
    def bound(self) -> float:
        """Of the largest logit difference; with ``quantize`` of the ratio of the perplexities."""
        if self.max_divergence is not None:
            return self.max_divergence
        return LOGIT_BOUND if self.quantize is None else PERPLEXITY_BOUND


def read_given(option: str, path: Path, content: str) -> str:
    """The text of the file that an option names and that is to hold ``content``. Raises DataError."""
    return read_text(path, lambda why: DataError(f"{option}: {why}; give a file of {content}"))
