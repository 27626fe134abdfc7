"""Learning-rate schedulers made elsewhere: torch's, or the user's with the same methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from forgather_cli.errors import ConfigError, SetupError


class TorchSchedule:
    """Torch LR schedulers stepped together, one per torch optimizer."""

    def __init__(self, schedulers: Iterable[Any]) -> None:
        self.schedulers: tuple[Any, ...] = tuple(schedulers)
        for scheduler in self.schedulers:
            _check_surface(scheduler)

    def step(self) -> None:
        """Call after the optimizer's step."""
        for scheduler in self.schedulers:
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group, for the next step."""
        return [float(lr) for scheduler in self.schedulers for lr in scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedulers": [_plain(scheduler.state_dict()) for scheduler in self.schedulers],
            "initial_lr": [[float(group["initial_lr"]) for group in _groups(s)] for s in self.schedulers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the saved state; where a group's initial learning rate has changed since, with the new one.

        Torch's schedulers leave the groups alone when they load, so the learning rates are set here.
        Raises SetupError if the number of schedulers differs.
        """
        if len(state["schedulers"]) != len(self.schedulers):
            raise SetupError(
                f"lr_scheduler: the checkpoint has {len(state['schedulers'])} schedulers, this run "
                f"{len(self.schedulers)}; leave scheduler out of resume_components"
            )
        for scheduler, saved, rates in zip(self.schedulers, state["schedulers"], state["initial_lr"], strict=True):
            _load(scheduler, saved, rates)


def _check_surface(scheduler: Any) -> None:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"lr_scheduler: {name} steps on a metric, which is not supported; choose one that counts steps"
        )
    missing = [
        m for m in ("step", "state_dict", "load_state_dict", "get_last_lr") if not callable(getattr(scheduler, m, None))
    ]
    if missing:
        raise ConfigError(f"lr_scheduler: a {name} has no {', '.join(missing)}; give a torch LR scheduler")


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    """The groups a scheduler sets; none for one that keeps its optimizer elsewhere than torch's do."""
    found: list[dict[str, Any]] = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    return found


def _tree(scheduler: Any) -> list[Any]:
    """A scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    return [scheduler, *(inner for child in getattr(scheduler, "_schedulers", ()) for inner in _tree(child))]


def _load(scheduler: Any, saved: dict[str, Any], saved_rates: list[float]) -> None:
    base_rates = [(part, list(part.base_lrs)) for part in _tree(scheduler) if hasattr(part, "base_lrs")]
    scheduler.load_state_dict(saved)
    for part, rates in base_rates:
        part.base_lrs = rates
    for group, lr, before in zip(_groups(scheduler), scheduler.get_last_lr(), saved_rates, strict=False):
        now = float(group["initial_lr"])
        lr = lr if now == before or not before else lr * now / before
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _plain(state: Any) -> Any:
    """Plain dictionaries, as a checkpoint holds them: MultiStepLR counts its milestones in a ``Counter``."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, list) else state
