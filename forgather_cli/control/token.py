"""The token of a job: what commands to it must show. No torch here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from forgather_cli.config.schema import ControlSettings
from forgather_cli.errors import ConfigError
from forgather_cli.input_files import read_text

VARIABLE = "FORGATHER_AUTH_TOKEN"
_TOKEN = re.compile(r"[!-~]{16,}")


def given_token(settings: ControlSettings) -> str | None:
    """``auth_token``, what ``auth_token_file`` holds, or what the environment has; None where one is to be drawn.

    Raises ConfigError for one that cannot be a token.
    """
    path = "callbacks.control.auth_token"
    if settings.auth_token is not None:
        token, where = settings.auth_token, path
    elif settings.auth_token_file is not None:
        file = Path(settings.auth_token_file).expanduser()
        where = f"{path}_file: {file}"
        token = read_text(file, lambda why: ConfigError(f"{path}_file: {why}; give a file with the token")).strip()
    elif VARIABLE in os.environ:
        token, where = os.environ[VARIABLE], f"{path}: {VARIABLE}"
    else:
        return None
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{where}: must be 16 or more letters, digits and signs without blanks; make it longer")
    return token
