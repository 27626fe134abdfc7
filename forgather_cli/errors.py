"""Every exception Forgather raises on purpose.

    ForgatherError                 something a user can act on; the message is the whole story
    ├── ConfigError                a setting is wrong: found before torch is imported, exit code 2
    │   └── CutOffError            a run's saved config is not whole
    ├── SetupError                 data, model, checkpoint, memory or disk is wrong: found before step 1, exit code 2
    │   ├── DataError
    │   ├── ModelError
    │   └── CheckpointError        damaged, foreign, newer or not matching
    ├── CallbackError              a user's callback raised; names callback and event
    ├── PartError                  another part of the user's own failed: model, data, loss, optimizer, scheduler
    ├── ControlError               no such job, or it does not do what it was told, exit code 1
    ├── ProofError                 a finalized model is not the one it was made from, exit code 1
    └── TrainingError              the run failed after it had started, exit code 1
        ├── DivergenceError        a loss or gradient norm that is not finite, or a loss that rose for good
        ├── ReplicationError       ranks hold different values of what must be equal
        └── OutOfMemoryError       with memory by kind and the settings most likely to help

A message says what is wrong, what was got and what to do, with settings named as typed.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher


class ForgatherError(Exception):
    """Base of all errors that are reported as one message without a traceback."""

    exit_code = 1


class ConfigError(ForgatherError):
    """One or several config mistakes, reported together.

    ``problems`` holds one line each: ``path: what is wrong, got X; what to do``.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CutOffError(ConfigError):
    """A run's saved config is empty, or ends before its end."""


class SetupError(ForgatherError):
    """Something outside the config is wrong; found before the first step."""

    exit_code = 2


class DataError(SetupError):
    """Corpus, tokenizer or token cache."""


class ModelError(SetupError):
    """Model directory, architecture or a capability the model lacks."""


class CheckpointError(SetupError):
    """A checkpoint that is damaged, foreign, of a newer format, or does not match the run."""


class CallbackError(ForgatherError):
    """A callback raised; the original exception is the cause. The edge of the process adds the option ``file``."""

    def __init__(self, name: str, event: str, problem: str) -> None:
        self.part, self.name, self.event, self.problem = f"callbacks.{name}", name, event, problem
        self.file: str | None = None
        super().__init__(name, event, problem)

    def __str__(self) -> str:
        return f"callback {self.name}{_in(self.file)} failed in {self.event}: {self.problem}"


class PartError(ForgatherError):
    """A part of the user's own failed, or made what cannot be trained with; the exception it raised is the cause.

    ``part``: its setting or argument (``model``, ``callbacks.tell``); ``name``: its class or function. The edge of the
    process adds the option ``file``. The exit code is 1 once a step was done (``has_trained``).
    """

    def __init__(self, part: str, name: str, problem: str, when: str = "") -> None:
        self.part, self.name, self.problem, self.when = part, name, problem, when
        self.file: str | None = None
        self.has_trained = False
        super().__init__(part, name, problem, when)

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return 1 if self.has_trained else 2

    def __str__(self) -> str:
        when = f" {self.when}" if self.when else ""
        return f"{self.part}: {self.name}{_in(self.file)} failed{when}: {self.problem}"


def _in(file: str | None) -> str:
    return f" ({file})" if file else ""


class ControlError(ForgatherError):
    """No such job, one that does not answer, or one that did not do what it was told."""


class ProofError(ForgatherError):
    """A finalized model does not compute what its source computes."""


class TrainingError(ForgatherError):
    """The run failed after it had started."""


class DivergenceError(TrainingError):
    """A loss or gradient norm is not finite, or a callback has seen the loss rise for good."""


class ReplicationError(TrainingError):
    """Ranks hold different values of state that must be equal on them, so what is trained is not one model."""


class NotFiniteError(TrainingError):
    """Weights or moments that were to be saved are infinite or no numbers."""


class OutOfMemoryError(TrainingError):
    """The device ran out of memory during a step, with ``batch`` sequences at a time.

    ``smaller_batch`` is set where the job is to start again with that many (auto_find_batch_size).
    """

    def __init__(self, message: str, batch: int | None = None, smaller_batch: int | None = None) -> None:
        self.batch, self.smaller_batch = batch, smaller_batch
        super().__init__(message)


def did_you_mean(name: str, known: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """`` did you mean a or b?`` for the nearest names, as in ``shown`` where that has them; empty if none is near."""
    found = sorted(((_likeness(name, each), each) for each in set(known)), key=lambda pair: (-pair[0], pair[1]))
    near = [each for likeness, each in found if likeness and likeness >= found[0][0] - 0.1]
    if len(near) > 3:  # as many as that are no help
        return ""
    return f" did you mean {' or '.join((shown or {}).get(each, each) for each in near)}?" if near else ""


def _likeness(name: str, known: str) -> float:
    """0 to 1: how like ``known`` a name is whose words are mistyped, cut short, run together, left out or too many.

    Whole words, since letters alone would see seed in deepspeed and hidden_size in step_size.
    """
    mine, theirs = (re.split(r"[^a-z0-9]+", text.lower()) for text in (name, known))
    if len(mine) == len(theirs) and all(pairs := [_word_likeness(*pair) for pair in zip(mine, theirs, strict=True)]):
        return sum(pairs) / len(pairs)
    together = SequenceMatcher(None, "".join(mine), "".join(theirs)).ratio()
    if together >= 0.9:
        return together
    fewer, more = sorted((mine, theirs), key=len)
    inside = len(fewer) < len(more) and all(any(_word_likeness(word, other) >= 0.8 for other in more) for word in fewer)
    return 0.5 if inside and (fewer is mine or len(fewer) > 1 or fewer[0] == more[0]) else 0.0


def _word_likeness(one: str, other: str) -> float:
    """0 for another word. Of short words, a larger part may be wrong: ddp typed dpp."""
    shorter = min(one, other, key=len)
    if len(shorter) >= 3 and one.startswith(shorter) and other.startswith(shorter):
        return 1.0 if one == other else 0.75
    ratio = SequenceMatcher(None, one, other).ratio()
    return ratio if ratio >= (0.6 if max(len(one), len(other)) < 5 else 0.75) else 0.0


def too_few_descriptors(error: BaseException | None) -> SetupError | None:
    """What to tell of an error that comes from the limit on open files, also where a library says so in words; None for
    any other.
    """
    text = os.strerror(errno.EMFILE)
    while error is not None:
        if text in str(error):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return SetupError(
                f"ulimit -n: a process may open {limit} files here, connections to other ranks among them, and needs "
                "more; allow more with ulimit -n 4096 in this shell"
            )
        error = error.__cause__ or error.__context__
    return None


def not_installed(error: BaseException) -> ConfigError | None:
    """What to tell of an import of a part of ours that has been taken out of this installation; None for any other."""
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    told = f"{name.replace('.', '/')}: is not part of this installation, and this needs it; install all of forgather"
    return ConfigError(told) if name.startswith("forgather_cli.") else None


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``, at most eight of them."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
