"""What a rank exchanges with the server: its parts of the weights as published, and what it has changed them by."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from forgather_cli.diloco.client import Client
from forgather_cli.diloco.encoding import Compression, decode, encode, is_lossy
from forgather_cli.diloco.fragments import fragments
from forgather_cli.diloco.parts import Part, Parts
from forgather_cli.errors import SetupError
from forgather_cli.models.parts import trainable_parameters
from forgather_cli.trainer.run import TrainingRun

log = logging.getLogger(__name__)

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8}
"""Of tensors on the wire."""

Values = dict[Part, Tensor]
"""fp32, on the CPU, of a rank's own parts."""


class Exchange:
    """A rank's parts of the published weights, by fragments. Only what is called collective is."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self.names: list[frozenset[str]] = []
        """Of the parameters, by fragment."""
        self._up: Compression = "fp32"
        self._down: Compression = "fp32"
        self._rounds_at_random = False
        self._snapshot: Values = {}
        """The weights as published, of which changes are made."""
        self._versions: list[int | None] = []
        """For each fragment, the round that has made the weights in ``_snapshot``; None where it lacks them."""
        self._error: Values = {}
        """What compression has lost so far and is still to be sent."""
        self._next_error: Values = {}
        """The same of the parts that were sent last, if that counts."""

    @cached_property
    def parts(self) -> Parts:
        """Collective, the first time."""
        run = self._run
        return Parts(dict(trainable_parameters(run.strategy.parts)), run.cpu_group, run.world.rank)

    def agree(self, settings: dict[str, Any]) -> None:
        """Take what the server says of all exchanges."""
        self._up, self._down = settings["compression"], settings["compression_down"]
        self._rounds_at_random = settings["stochastic_rounding"]
        self.names = fragments(dict(self.parts.shapes), settings["num_fragments"])
        self._versions = self._versions or [None] * len(self.names)

    def forget(self) -> None:
        """Nothing of the snapshot is the server's any more."""
        self._snapshot, self._versions = {}, [None] * len(self.names)

    @property
    def is_complete(self) -> bool:
        """Whether the snapshot has all fragments."""
        return None not in self._versions

    # ----------------------------------------------------------------------------------------------- what is published

    def fetch(self, client: Client, versions: Sequence[int], *, follows: bool) -> Values:
        """This rank's parts of the weights that those rounds have made, by fragment, those that the snapshot has not.

        ``follows``: they are one round behind the snapshot, so that its changes do. Raises what ``Client`` does.
        """
        found: Values = {}
        for names, held, wanted in zip(self.names, self._versions, versions, strict=True):
            own = [part for part in self.parts.own if part.name in names]
            if held == wanted or not own:
                continue
            if self._down != "fp32" and held is not None and follows:
                keys = [(part, name) for part in own for name in (part.name, f"{part.name}:scale")]
                read = _read(client, f"/changes/{wanted}", keys)
                for part in own:
                    sent = {name: values for (of, name), values in read.items() if of == part}
                    found[part] = self._snapshot[part] + decode(part.name, sent, part.held_shape, self._down)
            else:
                read = _read(client, f"/weights/{wanted}", [(part, part.name) for part in own])
                found |= {part: values.view(part.held_shape) for (part, _), values in read.items()}
        return found

    def hold(self, fresh: Values, versions: list[int]) -> None:
        """Make what was fetched the snapshot."""
        self._snapshot |= fresh
        self._versions = list(versions)

    def set_weights(self, which: Collection[int], share: float = 0.0) -> None:
        """Collective. Set the model's weights of these fragments to the snapshot, or to ``share`` of what they are and
        the rest of that."""
        self.parts.set(self._snapshot, frozenset[str]().union(*(self.names[each] for each in which)), share)

    # ------------------------------------------------------------------------------------------------- what is changed

    @torch.no_grad()
    def write_change(self, round: int, which: Collection[int]) -> tuple[str, str, float, int]:
        """Encode what this rank's parts of these fragments have changed by, into a file of the run directory; returns
        its name, its SHA-256, the square of the change's norm, and how many parts it has.
        """
        from safetensors.torch import save_file

        own = [part for part in self.parts.own if any(part.name in self.names[each] for each in which)]
        tensors: dict[str, Tensor] = {}
        square = torch.zeros((), dtype=torch.float64)
        for part in own:
            change = self._snapshot[part] - self.parts.values(part).to("cpu", torch.float32)
            square += change.double().square().sum()
            if part in self._error:
                change += self._error[part]
            random = None
            if self._rounds_at_random:  # as after a kill, so that the same is sent
                seed = hashlib.sha256(f"{self._run.seed} {self._run.seed_rank} {round} {_key(part)}".encode()).digest()
                random = torch.Generator().manual_seed(int.from_bytes(seed[:8], "little"))
            sent = encode(part.name, change, self._up, random)
            tensors |= sent
            if is_lossy(self._up):
                self._next_error[part] = change - decode(part.name, sent, part.held_shape, self._up)
            if self._down == "fp32":  # the next weights take its place; else their change is added to it
                del self._snapshot[part]
        if self._down == "fp32":
            self._versions = [None if at in which else version for at, version in enumerate(self._versions)]
        directory, rank = self._run.run_dir.diloco_worker, self._run.world.rank
        for old in directory.glob(f"*-{rank}.safetensors"):
            old.unlink()
        file = directory / f"round-{round}-{rank}.safetensors"
        rows = json.dumps({part.name: [part.start, part.rows] for part in own})
        save_file(tensors, file, metadata={"rows": rows})
        with file.open("rb") as written:
            os.fsync(written.fileno())
            return file.name, hashlib.file_digest(written, "sha256").hexdigest(), float(square), len(own)

    def upload(self, client: Client, files: Sequence[tuple[str, str]]) -> None:
        """Send those of these files (name, SHA-256) that fall to this rank, as far as the server lacks them. Raises
        what ``Client`` does, and SetupError for a file that is gone.
        """
        world = self._run.world
        for name, digest in files[world.rank :: world.size]:  # as many as there were ranks when they were written
            file = self._run.run_dir.diloco_worker / name
            if client.has(f"/parts/{digest}"):
                continue
            try:
                client.put(f"/parts/{digest}", file)
            except FileNotFoundError as error:
                raise SetupError(
                    f"{file}: is gone, and the DiLoCo server lacks it; restore it, or resume from an older checkpoint"
                ) from error

    def settle(self, *, counts: bool) -> None:
        """What was sent last counts, or does not: then what compression has lost is as it was before."""
        if counts:
            self._error |= self._next_error
        self._next_error = {}

    # ---------------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> dict[str, Any]:
        """Of each rank. The published weights are not there: the server has them."""
        errors = {"errors": self._error, "next_errors": self._next_error}
        return {name: [[_key(part), lost] for part, lost in values.items()] for name, values in errors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Collective."""
        self._snapshot, self._versions = {}, []
        own = {tuple(_key(part)): part for part in self.parts.own}
        for target, saved in ((self._error, state["errors"]), (self._next_error, state["next_errors"])):
            target.clear()
            target |= {own[tuple(key)]: values for key, values in saved if tuple(key) in own}
            if len(target) < len(saved):
                target.clear()
                log.warning("diloco: what compression has lost was saved by another layout of ranks and starts at zero")


def _read(client: Client, path: str, wanted: Sequence[tuple[Part, str]]) -> dict[tuple[Part, str], Tensor]:
    """The rows of parts, of those tensors ``wanted`` that the server's safetensors file has."""
    head = client.get(f"{path}/header")
    begin = 8 + int.from_bytes(head[:8], "little")
    entries = json.loads(head[8:begin])
    found: dict[tuple[Part, str], Tensor] = {}
    ranges = []
    for part, name in wanted:
        if (entry := entries.get(name)) is not None:
            shape, start = entry["shape"], begin + entry["data_offsets"][0]
            rows = (part.rows, *shape[1:]) if shape else ()
            found[part, name] = values = torch.empty(rows, dtype=_DTYPES[entry["dtype"]])
            row = values.itemsize * math.prod(shape[1:])
            ranges.append((start + part.start * row, start + (part.start + part.rows) * row))
    if ranges:
        client.read(path, ranges, [values.view(-1).view(torch.uint8).numpy().data for values in found.values()])
    return found


def _key(part: Part) -> list[Any]:
    return [part.name, part.start, part.rows]
