"""A member of a DiLoCo run that has the token and lies, for ``diloco_campaign.py``: a thread with words of its own.

It sends what nobody should ("mischief": garbage, wrong types, huge numbers, registrations that are refused, idle
connections), and ends each round with a submission that must be rejected, until the server gives it up. ``plays`` sends
what may count in between, and so is not given up; ``void`` sends NaN alone; ``knocks`` never gets in.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import random
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from forgather_cli.diloco.encoding import encode
from forgather_cli.diloco.fragments import fragments
from forgather_cli.diloco.wire import MAX_REJECTED, VERSION_HEADER, WIRE_VERSION, model_hash

NAN = float("nan")
NUMBERS: list[dict[str, Any]] = [
    {"targets": 10**18}, {"targets": 10**400}, {"targets": -1}, {"targets": NAN}, {"targets": "many"},
    {"targets": None}, {"targets": 2.5}, {"step": 10**30}, {"sent": -1}, {"tokens_per_second": NAN}, {"parts": []},
]  # fmt: skip
CHANGES = ("nan", "infinite")
MAY_COUNT = ("tiny", "grows", "small", "huge", "1000 x")
_PAUSE = 0.1  # seconds before it asks a server again that is away


class Liar:
    """As a context: the thread lies in it. ``problems``: what the server has answered and must not."""

    def __init__(self, port: int, token: str, run: Path, seed: int, how: str) -> None:
        """``how``: lies, plays, void or knocks; ``run``: of the server."""
        self._port, self._token, self._run, self._how = port, token, run, how
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._idle: list[socket.socket] = []
        self._weights: dict[str, Tensor] = {}
        self._settings: dict[str, Any] = {}
        self._generation = -1
        self._rejected = 0
        """In a row; as many as are allowed, once it is given up."""
        self._made: tuple[str, bytes, dict[str, Any]] = "", b"", {"round": -1}
        """Of the newest round: what is wrong, the part and the message."""
        self._sent = -1
        """The newest round whose submission the server has."""
        self._growth = 1e-4
        self.told: Counter[str] = Counter()
        """What was sent how often."""
        self.problems: list[str] = []
        self.counted: dict[int, str] = {}
        """By round: what must not count."""

    def __enter__(self) -> Liar:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self._idle:
            connection.close()

    @property
    def is_broken(self) -> bool:
        """It lies no more, by a mistake of its own."""
        return not self._thread.is_alive()

    def _live(self) -> None:
        while not self._stop.wait(_PAUSE if self._how == "knocks" or self._rejected >= MAX_REJECTED else 0.01):
            try:
                if not self._weights:
                    self._weights = self._fetch()
                if self._how != "void":
                    self._make_mischief()
                if self._how == "knocks" or self._rejected >= MAX_REJECTED:  # it must not come back by itself
                    continue
                offer = self._next()
                if offer.get("code") == "evicted":
                    self._hear("rejected")
                    self._rejected = MAX_REJECTED
                elif offer.get("state") == "open":
                    if self._sent >= 0 and self._sent == self._made[2]["round"]:
                        self._hear(offer["answer"][0])
                    if offer["round"] > self._made[2]["round"]:
                        self._make(offer)
                    self._submit()
            except (OSError, http.client.HTTPException):
                self._generation = -1  # a server that starts again asks all to register
                self._stop.wait(_PAUSE)
            except Exception as error:  # of this thread, which nobody else would hear of
                self.problems.append(f"the liar fails: {type(error).__name__}: {error}")
                return

    # ------------------------------------------------------------------------------------------------- what it must do

    def _ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        with contextlib.closing(connection):
            named = {"Authorization": f"Bearer {self._token}", VERSION_HEADER: str(WIRE_VERSION), **headers}
            connection.request(
                method, path, body if isinstance(body, bytes | None) else json.dumps(body).encode(), named
            )
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _fetch(self) -> dict[str, Tensor]:
        """The initial weights."""
        status, header = self._ask("GET", "/weights/0/header")
        if status != 200:
            raise ConnectionError(f"no weights yet: {status}")
        entries = json.loads(header[8:])
        size = max(each["data_offsets"][1] for name, each in entries.items() if name != "__metadata__")
        _, body = self._ask("POST", "/weights/0", {"ranges": [[len(header), len(header) + size]]})
        return safetensors.torch.load(header + body)

    def _registration(self, **more: Any) -> dict[str, Any]:
        model = model_hash((name, tuple(values.shape)) for name, values in self._weights.items())
        return {"worker": "c", "secret": "c", "host": "here", "pid": 1, "run": "none", "model": model, "data": None,
                "tokenizer": None, "batch": 8, "stated": {}, "round": None, "parent": None, "leaves": False,
                "dylu": False, **more}  # fmt: skip

    def _next(self) -> dict[str, Any]:
        if self._generation < 0:
            status, body = self._ask("POST", "/register", self._registration())
            if status != 200:
                raise ConnectionError(f"not registered: {status} {body!r}")
            answer = json.loads(body)
            self._generation, self._settings = answer["generation"], answer["settings"]
        status, body = self._ask("POST", "/next", {"generation": self._generation, "after": self._sent, "wait": 1.0})
        offer: dict[str, Any] = json.loads(body)
        if status != 200 and offer.get("code") != "evicted":
            raise ConnectionError(f"no round: {status}")
        return offer

    def _submit(self) -> None:
        _, content, told = self._made
        if self._ask("PUT", f"/parts/{hashlib.sha256(content).hexdigest()}", content)[0] >= 300:
            raise ConnectionError("the part was not taken")
        status, body = self._ask("POST", "/submit", {**told, "generation": self._generation})
        if status != 202:
            raise ConnectionError(f"not taken: {status} {body!r}")
        self._sent = told["round"]

    def _make(self, offer: dict[str, Any]) -> None:
        """What must be rejected, or in between what may count."""
        count, kind = self._settings["num_fragments"], self._rng.choice(("numbers", "change"))
        names = fragments({name: tuple(values.shape) for name, values in self._weights.items()}, count)
        lie, change = {}, "nan"
        if self._how != "void":
            lie = self._rng.choice(NUMBERS) if kind == "numbers" else {}
            change = "small" if lie else self._rng.choice(CHANGES)
            if self._how == "plays" and offer["round"] % 2:
                lie, change = {}, self._rng.choice(MAY_COUNT if self._is_outvoted() else ("tiny", "small"))
        content = self._part(sorted(names[offer["round"] % count]), change)
        told = {"round": offer["round"], "hash": offer["hash"], "parts": [hashlib.sha256(content).hexdigest()],
                "targets": 1, "ranges": offer["ranges"], "leaves": False, "speed": 2**53, **lie}  # fmt: skip
        self._made = next(iter(lie), change), content, told

    def _is_outvoted(self) -> bool:
        """Whether most members are honest: once others have ended, two members may spoil the run for each other."""
        *_, line = (self._run / "rounds.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
        return len(json.loads(line)["members"]) > 2

    def _hear(self, status: str) -> None:
        """What became of the newest submission."""
        what, _, told = self._made
        self.told[what] += 1
        self._rejected = self._rejected + 1 if status == "rejected" else 0
        if status != "rejected" and what not in MAY_COUNT:
            self.counted[told["round"]] = what

    def _part(self, names: list[str], change: str) -> bytes:
        """A change of whole tensors."""
        self._growth *= 1.5 if change == "grows" else 1.0
        factor = {"small": 1e-3, "1000 x": 1000.0, "grows": self._growth}.get(change)
        filled = {"nan": NAN, "infinite": float("-inf"), "huge": 3e38, "tiny": 1e-9}.get(change, 0.0)
        tensors, rows = {}, {}
        for name in names:
            weights = self._weights[name]
            values = torch.full_like(weights, filled) if factor is None else weights * factor
            tensors |= encode(name, values, self._settings["compression"])
            rows[name] = [0, weights.shape[0] if weights.ndim else 1]
        return safetensors.torch.save(tensors, {"rows": json.dumps(rows)})

    # ------------------------------------------------------------------------------------------------ what it need not

    def _make_mischief(self) -> None:
        """A few requests that must be refused, each with a status from 400 to 499."""
        refused: list[tuple[str, str, Any, dict[str, str]]] = [
            ("POST", "/submit", bytes(self._rng.randbytes(100)), {}),
            ("POST", "/submit", b"[" * 10_000, {}),
            ("POST", "/submit", b'{"generation": ' + b"9" * 5_000 + b"}", {}),
            ("POST", "/submit", {"generation": 10**30, "round": 0, "hash": "", "parts": [], "leaves": False}, {}),
            ("POST", "/submit", {"generation": self._generation, "round": "0"}, {}),
            ("POST", "/heartbeat", {"generation": max(self._generation, 0), "tokens_per_second": NAN}, {}),
            ("POST", "/next", {"generation": 1, "after": -(10**30), "wait": NAN}, {}),
            ("POST", "/register", self._registration(worker="d", batch=10**30), {}),
            ("POST", "/register", self._registration(worker="d", batch=True), {}),
            ("POST", "/register", self._registration(worker="../d"), {}),
            ("POST", "/register", self._registration(worker="d", model="0" * 64), {}),
            ("POST", "/register", self._registration(worker="d", stated={"sync_every": 10**30}), {}),
            ("POST", "/register", self._registration(worker="d", round=0, parent="f" * 64), {}),
            ("POST", "/register", self._registration(worker="d", run="x" * 100_000), {}),
            ("GET", "/weights/" + "9" * 5_000 + "/header", None, {}),
            ("POST", "/weights/0", {"ranges": [[0, 10**30]]}, {}),
            ("PUT", "/parts/" + "0" * 64, b"none", {}),
            ("GET", "/status", None, {"Authorization": "Bearer none"}),
            ("GET", "/status", None, {"Forgather-Wire": "9"}),
            ("POST", "/control", {"command": "rm"}, {}),
        ]  # fmt: skip
        for method, path, body, headers in self._rng.sample(refused, 3):
            status, answer = self._ask(method, path, body, **headers)
            self.told["refused"] += 1
            if not 400 <= status < 500:
                self.problems.append(f"{method} {path[:40]} {str(body)[:80]} is answered {status} {answer[:200]!r}")
        while len(self._idle) < 100:
            self._idle.append(socket.create_connection(("127.0.0.1", self._port), timeout=5))
