"""How the ranks of a job reach the server: they ask again and again where it does not answer, and agree on the end."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from forgather_cli.config.schema import DilocoSettings
from forgather_cli.diloco import wire
from forgather_cli.diloco.client import Away, Client, TokenBucket
from forgather_cli.distributed import gather
from forgather_cli.documents.regular_files import read_json_object, write_whole
from forgather_cli.errors import ConfigError, ForgatherError, SetupError
from forgather_cli.launch.exit_status import STOPPED, ExitStatus, Kind, done
from forgather_cli.trainer.run import TrainingRun

log = logging.getLogger(__name__)

_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)  # seconds between two tries, the last again and again

T = TypeVar("T")


class Link:
    """The server of a job. ``call`` and ``on_all_ranks`` are collective over its ranks."""

    def __init__(self, run: TrainingRun, settings: DilocoSettings, address: str) -> None:
        self._run, self._settings = run, settings
        limit = None if settings.bandwidth is None else settings.bandwidth / run.world.size
        try:
            tls = ssl.create_default_context(cafile=settings.ca_file)
        except OSError as error:
            raise ConfigError(
                f"callbacks.diloco.ca_file: {settings.ca_file} cannot be used ({error.strerror or error}); give a file "
                "of certificates (PEM)"
            ) from error
        self.client = Client(address, settings.read_token(), TokenBucket(limit), tls=tls)
        """Of this rank's main thread."""
        self.ended: ExitStatus | None = None
        """Why training with the server is over, if it is."""
        self._bidden = ""
        """What the server has told a heartbeat: why training is over."""
        self.retries = 0
        self.sent = self.received = 0
        """Bytes of all ranks, up to the last message that they sent together."""
        self._heart = threading.Event()
        """Set to end the heartbeats."""

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """What the server answers, on all ranks; None if training ends instead. Raises as ``on_all_ranks``."""
        found: list[dict[str, Any]] = []

        def on_rank_0() -> None:
            if self._run.world.rank == 0:
                found.append(self.client.call(path, body))

        if not self.on_all_ranks(on_rank_0):
            return None
        return gather(found[0] if found else None, self._run.cpu_group)[0]

    def on_all_ranks(self, action: Callable[[], None]) -> bool:
        """Run ``action`` on every rank, again where the server does not answer. False if training ends instead: by a
        signal, a command, or since the server has been silent for too long.

        Raises what it raised on any rank, Away excepted.
        """
        run, is_done, begun = self._run, False, time.monotonic()
        tries, allowed = 0, self._settings.timeout * max(1, self._settings.max_sync_retries)
        while True:
            failure: ForgatherError | None = None
            if not is_done:
                try:
                    action()
                    is_done = True
                except ForgatherError as error:
                    failure = error
            bucket = self.client.bucket
            mine = (failure, time.monotonic() - begun, self._bidden, bucket.sent, bucket.received)
            told = gather(mine, run.cpu_group)
            self.sent, self.received = sum(each[3] for each in told), sum(each[4] for each in told)
            stops = run.sync.poll()
            failures = [each for each, *_ in told if each is not None]
            if fatal := next((each for each in failures if not isinstance(each, Away)), None):
                raise fatal
            if not failures:
                if tries:
                    log.info("the DiLoCo server answers again")
                return not stops
            if stops:
                return False
            if bidden := told[0][2]:
                self.end_by_server(bidden)
                return False
            if tries == 0:
                log.warning("%s; trying again for %.0f s", failures[0], allowed)
            if told[0][1] > allowed:
                why = f"stopped: {failures[0]}, for {allowed:g} s; start it, and resume this run"
                self.end(ExitStatus(run.world.rank, Kind.STOPPED, STOPPED, why))
                return False
            self.retries += 1
            time.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1

    def end_by_server(self, reason: str) -> None:
        """Training ends, since the server says that it is over."""
        self.end(done(self._run.world.rank, f"stopped by the DiLoCo server: {reason}"))

    def end(self, status: ExitStatus) -> None:
        """Training ends by ``status``, with a checkpoint."""
        self.ended = status
        self._run.control.should_training_stop = self._run.control.should_save = True
        self._heart.set()

    # -------------------------------------------------------------------------------------------------- who this one is

    def identity(self) -> tuple[str, str]:
        """The worker's id, and what proves that another start is the same worker; made up once."""
        path = self._run.run_dir.diloco_worker / "worker.json"
        path.parent.mkdir(exist_ok=True)
        remedy = "remove it, and resume with callbacks.diloco.worker_id=ID as forgather diloco status shows it"
        known = read_json_object(path, lambda why: SetupError(f"{why}; {remedy}")) if path.exists() else {}
        secret = str(known.get("secret") or secrets.token_hex(16))
        made_up = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        stated = self._settings.worker_id or os.environ.get("DILOCO_WORKER_ID", "")
        worker = stated or str(known.get("worker_id") or made_up)
        if known != {"worker_id": worker, "secret": secret}:
            write_whole(path, json.dumps({"worker_id": worker, "secret": secret}), 0o600)
        return worker, secret

    def start_heartbeats(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Tell the server now and then that this worker lives, and ``facts``, from a thread of its own on rank 0."""
        client, interval = self.client.copy(), self._settings.interval()

        def beat() -> None:
            while not self._heart.wait(interval):
                try:
                    if (answer := client.call("/heartbeat", facts()))["state"] == wire.STOPPED:
                        self._bidden = answer["reason"]
                except ForgatherError as error:  # the next exchange finds out what it means
                    log.debug("heartbeat: %s", error)

        if self._run.world.rank == 0:
            threading.Thread(target=beat, name="diloco-heartbeat", daemon=True).start()

    def stop_heartbeats(self) -> None:
        self._heart.set()
