"""A worker in a few lines, and the server as a process: what tests of the server need."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from forks import Program
from torch import Tensor

from forgather_cli.diloco.encoding import Compression, encode
from forgather_cli.diloco.wire import WIRE_VERSION, model_hash
from forgather_cli.run_dir import RunDir

TINY = (
    "model=nano", "precision=fp32", "data=synthetic", "num_hidden_layers=1", "hidden_size=16", "intermediate_size=32",
    "num_attention_heads=2", "num_key_value_heads=1", "seq_len=16", "num_samples=64",
)  # fmt: skip


@dataclass
class Answer:
    status: int
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Client:
    port: int
    token: str
    version: str = str(WIRE_VERSION)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with contextlib.closing(connection):
            named = {"Authorization": f"Bearer {self.token}", "Forgather-Wire": self.version, **headers}
            connection.request(method, path, content, named)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())

    def post(self, path: str, **body: Any) -> Any:
        answer = self.ask("POST", path, body)
        assert answer.status < 300, answer.content
        return answer.json

    def status(self) -> Any:
        return self.ask("GET", "/status").json

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(values.shape) for name, values in self.weights(0).items()}

    def weights(self, round: int, what: str = "weights") -> dict[str, Tensor]:
        """Fetched in two ranges, as ranks would."""
        header = self.ask("GET", f"/{what}/{round}/header").content
        entries = json.loads(header[8:])
        size = max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
        start, stop = len(header), len(header) + size
        middle = start + size // 3
        answer = self.ask("POST", f"/{what}/{round}", {"ranges": [[start, middle], [middle, stop]]})
        assert answer.status == 200, answer.content
        return safetensors.torch.load(header + answer.content)

    def latest(self) -> dict[str, Tensor]:
        """All weights, each from the round that has made it, by the files of the server's run."""
        found = {}
        for path in sorted((Path(self.status()["run"]) / "weights").glob("round-*.safetensors")):
            found |= safetensors.torch.load_file(path)
        return found


@dataclass
class FakeWorker:
    """Sends changes that are a function of (name, round): what a real one would have trained."""

    client: Client
    name: str
    compression: Compression = "fp32"
    batch: int = 4
    num_parts: int = 2
    shows_generation: bool = True
    generation: int = -1
    offer: Any = None
    sent: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def registration(self, **more: Any) -> dict[str, Any]:
        shapes = self.client.shapes
        told = {
            "worker": self.name, "secret": f"secret of {self.name}", "host": "here", "pid": os.getpid(), "run": "run",
            "model": model_hash(shapes.items()), "data": "d", "tokenizer": "t",
            "batch": self.batch, "stated": {}, "round": None, "parent": None,
            "leaves": False, "dylu": False,
        }  # fmt: skip
        return {**told, **more}

    def register(self, **more: Any) -> Any:
        answer = self.client.post("/register", **self.registration(**more))
        self.generation = answer["generation"]
        return answer

    def next(self, after: int, wait: float = 30.0) -> Any:
        self.offer = self.client.post("/next", generation=self.generation, after=after, wait=wait)
        return self.offer

    def change(self, round: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * sum(map(ord, self.name)) + round)
        shapes = sorted(self.client.shapes.items())
        return {name: torch.randn(shape, generator=generator) / 10 for name, shape in shapes}

    def parts(self, change: dict[str, Tensor]) -> list[bytes]:
        """Rows of every tensor over ``num_parts`` parts, as ranks send what they own."""
        found = []
        for rank in range(self.num_parts):
            tensors, rows = {}, {}
            for name, values in change.items():
                count = values.shape[0] if values.ndim else 1
                start, stop = rank * count // self.num_parts, (rank + 1) * count // self.num_parts
                if start < stop:
                    tensors |= encode(name, values[start:stop] if values.ndim else values, self.compression)
                    rows[name] = [start, stop - start]
            found.append(safetensors.torch.save(tensors, {"rows": json.dumps(rows)}))
        return found

    def put(self, parts: list[bytes]) -> list[str]:
        sums = [hashlib.sha256(part).hexdigest() for part in parts]
        for name, part in zip(sums, parts, strict=True):
            whose = {"Forgather-Generation": str(self.generation)} if self.shows_generation else {}
            answer = self.client.ask("PUT", f"/parts/{name}", part, **whose)
            assert answer.status in (200, 202), answer.content
        return sums

    def submit(self, change: dict[str, Tensor], targets: int = 100, **more: Any) -> Any:
        offer = self.offer
        told = {
            "generation": self.generation, "round": offer["round"], "hash": offer["hash"],
            "parts": self.put(self.parts(change)), "targets": targets, "ranges": offer["ranges"], "leaves": False,
            "speed": None,
        }  # fmt: skip
        self.sent[offer["round"]] = change
        return self.client.post("/submit", **{**told, **more})


@dataclass
class Served:
    process: Program
    run: RunDir
    client: Client
    output: Path

    def end(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(60)

    def is_at(self, number: int) -> bool:
        """Whether that round has opened."""
        return (self.client.status()["round"] or 0) >= number

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.rounds.read_text().splitlines()]

    def used_samples(self) -> list[int]:
        """Of all counted submissions, sorted."""
        sent = [sent for line in self.ledger() if line["closed"] for sent in line["closed"]["submissions"]]
        return sorted(sample for each in sent for first, last in each["ranges"] for sample in range(first, last))

    def said(self) -> str:
        return self.output.read_text()


@contextlib.contextmanager
def serving(run: Path, *settings: str, resume: bool = False, source: str = "default") -> Iterator[Served]:
    """``forgather diloco server`` (or ``resume``) of the tiny model in ``run``, on a free port."""
    output = run.with_name(f"{run.name}.out")
    words = ["resume", str(run)] if resume else ["diloco", "server", source, f"output_dir={run}", "diloco.port=0"]
    place = RunDir(run)
    output.touch()  # it writes there itself: what it has said when it answers can be read
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = Program(
        ("-m", "forgather_cli", *words, *settings), str(Path.cwd()), environment, file=str(output.absolute())
    )
    process.stdout.close()
    try:
        yield Served(process, place, _connected(process, place, output), output)
    finally:
        process.kill()
        process.wait()


def _connected(process: Program, run: RunDir, output: Path) -> Client:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError, KeyError):
            address = json.loads(run.diloco_address.read_text())
            if address["pid"] == process.pid:
                return Client(address["port"], run.diloco_token.read_text().strip())
        assert process.poll() is None, output.read_text()
        time.sleep(0.02)
    raise AssertionError(output.read_text())


def certificate(root: Path, name: str) -> tuple[str, str]:
    """Files of a certificate for 127.0.0.1, and of its key."""
    made = (str(root / f"{name}.pem"), str(root / f"{name}.key"))
    words = [
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
        "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1", "-out", made[0], "-keyout", made[1],
    ]  # fmt: skip
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    return made
