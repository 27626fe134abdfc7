"""What workers have sent is measured fragment by fragment, and stays as long as anybody looks at it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from diloco.test_rounds import MODEL, SIZES

from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco.api import Api, Service
from forgather_cli.diloco.global_model import GlobalModel
from forgather_cli.diloco.ledger import Submission
from forgather_cli.diloco.outer_step import OuterStep
from forgather_cli.diloco.rounds import Rounds
from forgather_cli.diloco.submissions import Submissions
from forgather_cli.diloco.wire import VERSION_HEADER, WIRE_VERSION
from forgather_cli.run_dir import RunDir


def test_a_save_deletes_no_part_that_is_being_looked_at(tmp_path: Path) -> None:
    """A global model saves just when a submission is looked at; in async mode newer rounds have opened by then."""
    settings, shapes = DilocoServerSettings(mode="async", workers=1), {"w": (3,)}
    submissions, rounds = Submissions(tmp_path / "sent", shapes, "fp32"), Rounds(settings, initial="i", model=MODEL)

    def save(ranges: Any = (), stated: int = 0) -> int:
        """In the place of ``most_targets``."""
        submissions.clean(0, float("inf"), keep=False)
        return 100

    outer = OuterStep(settings, shapes)
    model = SimpleNamespace(outer=outer, sizes=SIZES, submissions=submissions, most_targets=save)
    generation, _ = rounds.register("a", "a", batch=4, model=MODEL, now=0.0)
    line = rounds.opening("t")
    rounds.append(line, 0.0)
    content = safetensors.torch.save({"w": torch.ones(3)}, {"rows": json.dumps({"w": [0, 3]})})
    part = hashlib.sha256(content).hexdigest()
    submissions.part(part).write_bytes(content)
    told = {"generation": generation, "round": 0, "hash": line.hash, "parts": [part], "ranges": [], "targets": 1,
            "leaves": False}  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(told).encode()}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = {"authorization": "Bearer t", VERSION_HEADER: str(WIRE_VERSION)}
    scope = {"type": "http", "method": "POST", "path": "/submit",
             "headers": [(key.lower().encode(), value.encode()) for key, value in headers.items()]}  # fmt: skip
    api = Api(Service(RunDir(tmp_path), settings, cast(GlobalModel, model), rounds), "t", "c")
    asyncio.run(api(scope, receive, send))
    assert json.loads(sent[1]["body"]) == {"status": "counted"}
    (submissions.root / "parts" / ".tmp-b").symlink_to("gone")  # an upload that has just got its name
    save()
    assert submissions.has(part), "its manifest names it"
    (submissions.root / "round-00000000-slot-0000.json").unlink()
    save()
    assert not submissions.has(part)


def test_each_fragment_of_a_change_has_a_norm_of_its_own(tmp_path: Path) -> None:
    change = {"layers.0.w": torch.full((3,), 2.0), "layers.1.w": torch.ones(4)}
    shapes = {name: tuple(values.shape) for name, values in change.items()}
    settings, submissions = DilocoServerSettings(workers=1, num_fragments=2), Submissions(tmp_path, shapes, "fp32")
    content = safetensors.torch.save(change, {"rows": json.dumps({name: [0, *shapes[name]] for name in shapes})})
    part = hashlib.sha256(content).hexdigest()
    submissions.part(part).write_bytes(content)
    model = SimpleNamespace(
        outer=OuterStep(settings, shapes), submissions=submissions, most_targets=lambda ranges, stated: 100
    )
    rounds = Rounds(settings, initial="i", model=MODEL)
    service = Service(RunDir(tmp_path), settings, cast(GlobalModel, model), rounds)
    last = Submission(0, "a", 1, (part,), 1, ((0, 1),), leaves=True)
    assert service.examined(last).norms == pytest.approx((math.sqrt(12), 2.0))
    assert "layers.0.w" in service.examined(replace(last, leaves=False)).rejected, "round 1 exchanges the other one"
