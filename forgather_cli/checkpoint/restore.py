"""Putting components back as a checkpoint has them; what it lacks, or has for another layout, starts fresh."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from forgather_cli.checkpoint.components import Component
from forgather_cli.checkpoint.load import Reader
from forgather_cli.errors import CheckpointError

log = logging.getLogger(__name__)


def restore_components(
    reader: Reader,
    components: Iterable[Component],
    *,
    rank: int = 0,
    world_size: int | None = None,
    only: Collection[str] | None = None,
) -> list[str]:
    """Load what the checkpoint has of ``components``; with ``only``, of those with these keys.

    ``world_size``: of this job, None for that of the checkpoint's. Returns the keys that start fresh: because the
    checkpoint lacks them, each with a warning, or because ranks' or groups' own states belong to another layout, which
    is one line of information. Raises CheckpointError if a required one starts fresh, and names the component whose
    state does not fit.
    """
    fresh, foreign = [], []
    size = reader.manifest.world_size if world_size is None else world_size
    for component in components:
        if only is not None and component.key not in only:
            continue
        if not reader.has(component):
            fresh.append(component.key)
        elif not reader.fits(component, size):
            foreign.append(component)
        else:
            _load(reader, component, rank)
    if foreign:
        _tell_foreign(reader, foreign, size)
    return fresh + [component.key for component in foreign]


def _tell_foreign(reader: Reader, foreign: Iterable[Component], size: int) -> None:
    saved = reader.manifest.world_size
    for component in foreign:
        if component.required:
            raise CheckpointError(
                f"{reader.path}: {component.key} was saved by each of {saved} ranks for itself, without which a run of "
                f"{size} cannot go on; resume it with {saved} ranks"
            )
    keys = ", ".join(component.key for component in foreign)
    log.info("%s: what %d ranks or their groups saved for themselves starts fresh here: %s", reader.path, saved, keys)


def _load(reader: Reader, component: Component, rank: int) -> None:
    state = reader.state(component.key, rank, component.group if component.sharing.is_grouped else "")
    try:
        component.object.load_state_dict(state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{reader.path}: the state of {component.key} does not fit this run ({type(error).__name__}: {error}); "
            "leave it out of resume_components if it may start fresh"
        ) from error
