"""What ``job_id`` and the settings of ``callbacks.control`` may be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from forgather_cli.config.schema import Config, ControlSettings
from forgather_cli.run_dir import is_name

_TOKEN = re.compile(r"[!-~]{16,}")
_PATH = "callbacks.control"


def control_problems(config: Config, given: frozenset[str]) -> Iterator[str]:
    """Problems of them, each with the remedy."""
    job_id, control = config.job_id, config.callbacks.control
    if job_id is not None and not is_name(job_id):
        yield (
            f"job_id: must be at most 100 letters, digits, dots, dashes and underscores, with a letter or digit first, "
            f"got {job_id!r}; set job_id=my-run or the like"
        )
    elif job_id == "latest":
        yield "job_id: latest stands for the newest job, got latest; choose another name"
    if job_id is not None and control is None and "job_id" in given:
        yield f"job_id: nothing reads it without {_PATH}; add it with '+{_PATH}={{}}' or leave job_id out"
    if control is not None:
        yield from _contradictions(control, given)


def _contradictions(control: ControlSettings, given: frozenset[str]) -> Iterator[str]:
    token = control.auth_token
    if token is not None and not _TOKEN.fullmatch(token):
        yield f"{_PATH}.auth_token: must be 16 or more letters, digits and signs without blanks; make it longer"
    if token is not None and control.disable_auth:
        yield f"{_PATH}.auth_token: nothing reads it with disable_auth=true; set one of the two"
    if not control.host:
        yield f"{_PATH}.host: must be an address, got nothing; set it to 127.0.0.1"
    if not control.enable_http:
        for name in ("host", "port", "auth_token", "disable_auth"):
            if f"{_PATH}.{name}" in given:
                yield f"{_PATH}.{name}: nothing reads it with enable_http=false; leave one of the two out"
