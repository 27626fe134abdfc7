"""Every exception Forgather raises on purpose.

    ForgatherError                 something a user can act on; the message is the whole story
    ├── ConfigError                a setting is wrong: found before torch is imported, exit code 2
    ├── SetupError                 data, model, checkpoint, memory or disk is wrong: found before step 1, exit code 2
    │   ├── DataError
    │   ├── ModelError
    │   └── CheckpointError        damaged, foreign, newer or not matching
    ├── CallbackError              a user's callback raised; names callback and event
    ├── ControlError               no such job, or it does not do what it was told, exit code 1
    ├── ProofError                 a finalized model is not the one it was made from, exit code 1
    └── TrainingError              the run failed after it had started, exit code 1
        ├── DivergenceError        a loss or gradient norm that is not finite, or a loss that rose for good
        ├── ReplicationError       ranks hold different values of what must be equal
        └── OutOfMemoryError       with memory by kind and the settings most likely to help

A message says what is wrong, what was got and what to do, with settings named as typed.
"""

from __future__ import annotations

from collections.abc import Sequence


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
    """A callback raised; the original exception is the cause."""


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
