"""What ``job_id`` and the settings of ``callbacks.control`` may be."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.schema import Config, ControlSettings
from forgather_cli.control.token import given_token
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import is_name

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
    given_here = [name for name in ("auth_token", "auth_token_file") if getattr(control, name) is not None]
    if len(given_here) == 2:
        yield f"{_PATH}.auth_token: excludes auth_token_file; leave one out"
    elif given_here and control.disable_auth:
        yield f"{_PATH}.{given_here[0]}: nothing reads it with disable_auth=true; set one of the two"
    elif control.enable_http and not control.disable_auth:
        try:
            given_token(control)
        except ConfigError as error:
            yield from error.problems
    if not control.host:
        yield f"{_PATH}.host: must be an address, got nothing; set it to 127.0.0.1"
    if not control.enable_http:
        for name in ("host", "port", "auth_token", "auth_token_file", "disable_auth"):
            if f"{_PATH}.{name}" in given:
                yield f"{_PATH}.{name}: nothing reads it with enable_http=false; leave one of the two out"
