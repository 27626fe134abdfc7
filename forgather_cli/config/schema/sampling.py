"""How a trained model writes: the one table of its settings, for ``callbacks.textgen`` and ``forgather generate``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Le

from forgather_cli.config.schema.base import Count, Settings, settings


@dataclass(frozen=True)
class Meaning:
    """Annotation of a setting: what it does, in a line."""

    text: str


@settings
class Sampling(Settings):
    """Names and meanings are those of transformers' ``GenerationConfig`` (5.24), ``stop`` and ``seed`` aside. Its beam
    search has that library's defaults: ``length_penalty`` 1, ``early_stopping`` false.
    """

    max_new_tokens: Annotated[int, Gt(0), Meaning("Tokens to make at most.")] = 200
    min_new_tokens: Annotated[int, Ge(0), Meaning("Tokens to make before an end token is taken.")] = 0
    stop: Annotated[list[str], Meaning("Stop before this text; may be given several times.")] = field(
        default_factory=list
    )
    do_sample: Annotated[bool, Meaning("Draw tokens, by their odds.")] = True
    temperature: Annotated[float, Gt(0), Meaning("Below 1 likelier, above 1 wilder.")] = 0.7
    top_k: Annotated[int, Ge(0), Meaning("Draw from the N likeliest tokens; 0: from all.")] = 20
    top_p: Annotated[float, Ge(0), Le(1), Meaning("Draw from the likeliest that sum up to X.")] = 1.0
    min_p: Annotated[float, Ge(0), Le(1), Meaning("Draw from those at least X times as likely as the likeliest.")] = 0.0
    typical_p: Annotated[float, Gt(0), Le(1), Meaning("Draw from the most expected ones that sum up to X.")] = 1.0
    num_beams: Annotated[int, Gt(0), Meaning("Follow N texts side by side and take the likeliest.")] = 1
    repetition_penalty: Annotated[float, Gt(0), Meaning("Above 1 makes tokens that were there less likely.")] = 1.0
    no_repeat_ngram_size: Annotated[int, Ge(0), Meaning("No N tokens in a row come twice; 0: they may.")] = 0
    seed: Annotated[int, Meaning("Seed of the draws.")] = 42
    eos_token_id: Count | list[Count] | None = None  # null: the tokenizer's
    pad_token_id: Count | None = None  # null: the tokenizer's

    def problems(self, config: Any = None) -> Iterator[str]:
        if self.min_new_tokens > self.max_new_tokens:
            most = f"max_new_tokens is {self.max_new_tokens}; lower one or raise the other"
            yield f"min_new_tokens: got {self.min_new_tokens}, and {most}"
        if any(not text for text in self.stop):
            yield "stop: is empty; give the text to stop before"

    def ends(self, by_default: Iterable[int]) -> list[int]:
        """The tokens that end a text: ``eos_token_id``, else these."""
        given = by_default if self.eos_token_id is None else self.eos_token_id
        return [given] if isinstance(given, int) else [*given]

    @property
    def choices(self) -> dict[str, Any]:
        """What ``models.generate.generate`` takes of it by name."""
        aside = ("stop", "seed", "eos_token_id", "pad_token_id")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in aside}


if TYPE_CHECKING:
    GenerationConfig = Sampling
else:
    # The same names, null where something else decides. The callback's draws follow from the run's seed.
    _names = {
        name: hint | None for name, hint in get_type_hints(Sampling, include_extras=True).items() if name != "seed"
    }
    GenerationConfig = settings(type("GenerationConfig", (), {"__annotations__": _names, **dict.fromkeys(_names)}))
