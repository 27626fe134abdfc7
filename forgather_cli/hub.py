"""Where the files of a model are on this machine: of a directory, a checkpoint, or one of the Hugging Face hub.

Those of the hub, by name, OWNER/NAME, are downloaded once.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from forgather_cli.config.schema import Config, Target
from forgather_cli.errors import ModelError, SetupError
from forgather_cli.run_dir import RunDir, is_adapter_directory, is_checkpoint, is_model_directory, model_in
from forgather_cli.terminal.bars import doing

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SMALL = ["*.json", "*.txt", "*.model", "*.jinja"]
"""Config and tokenizer; with ``*.safetensors`` all that is read of a model. Pickles and code stay where they are."""
_PATIENCE = 5.0  # seconds until the hub counts as out of reach; its libraries would try for 25 and more


def is_hub_name(text: str) -> bool:
    """True for OWNER/NAME, unless there is a folder OWNER here: then it is a path."""
    return _NAME.fullmatch(text) is not None and not Path(text.partition("/")[0]).exists()


def hub_name_of(directory: Path) -> str | None:
    """OWNER/NAME of a directory in the hub's cache; None of any other."""
    found = re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/\w+$", str(directory))
    return None if found is None else f"{found[1]}/{found[2]}"


def with_local_model(config: Config, *, weights: bool = True) -> Config:
    """``config`` with the directories of what ``model.path``, ``model.init_from`` and ``data.tokenizer`` name: files of
    the hub, and of a checkpoint its model.

    ``weights``: download those too. Raises SetupError.
    """
    model, data = cast(Any, config.model), cast(Any, config.data)
    path, tokenizer = getattr(model, "path", None), getattr(data, "tokenizer", None)
    changes: dict[str, Any] = {}
    if path is not None and is_hub_name(path):
        changes["model"] = replace(model, path=str(local_model(path, "model.path", weights=weights)))
    elif (named := _named_directory(config)) is not None and is_checkpoint(named[1]):
        changes["model"] = replace(model, **{named[0]: str(model_in(named[1]))})
    if isinstance(tokenizer, str) and is_hub_name(tokenizer):
        name = "model.path" if tokenizer == path else "data.tokenizer"
        changes["data"] = replace(data, tokenizer=str(local_model(tokenizer, name, weights=False)))
    elif isinstance(tokenizer, str) and is_checkpoint(at := Path(tokenizer).expanduser()):
        changes["data"] = replace(data, tokenizer=str(model_in(at)))
    return replace(config, **changes) if changes else config


def _named_directory(config: Config) -> tuple[str, Path] | None:
    """The setting of ``model`` that names a directory here with its weights, and the directory; None without one."""
    if isinstance(config.model, Target) or (path := config.model.directory) is None:
        return None
    name = config.model.directory_setting
    return None if name == "path" and is_hub_name(path) else (name, Path(path).expanduser())


def check_model(config: Config) -> None:
    """Raise ModelError if the directory that gives the model's weights holds none. Imports nothing that takes time."""
    named = _named_directory(config)
    if named is None or is_model_directory(model_in(named[1])):
        return
    setting, path = f"model.{named[0]}", named[1]
    if not path.is_dir():
        raise ModelError(f"{setting}: no such directory: {path}; give a model directory or a checkpoint")
    if is_adapter_directory(model_in(path)):
        raise ModelError(
            f"{setting}: {path} is an adapter; name the model that it is for, and set adapter=lora (or dora) and "
            f"adapter.from_adapter={model_in(path)} to go on from it"
        )
    if is_checkpoint(path):
        raise ModelError(
            f"{setting}: {path} is a checkpoint of a model that code of its run builds (no model/config.json); set "
            f"model._target_ as there, resume_from_checkpoint={path} and resume_components=[model]"
        )
    if steps := RunDir(path).checkpoint_steps():
        newest = RunDir(path).checkpoint(steps[-1])
        raise ModelError(f"{setting}: {path} is a run; give one of its checkpoints, {setting}={newest}")
    raise ModelError(f"{setting}: {path} has no config.json; give a model directory or a checkpoint")


@doing("asking the hub for the model")
def local_model(name: str, what: str, *, weights: bool = True) -> Path:
    """The directory of a model of the hub in the hub's cache; what it lacks is downloaded, with bars on a terminal.

    Without a network what is in the cache is taken. Raises SetupError, which begins with ``what``.
    """
    from huggingface_hub import constants, errors, snapshot_download

    files = [*_SMALL, "*.safetensors"] if weights else _SMALL
    online = not constants.HF_HUB_OFFLINE and can_reach(constants.ENDPOINT)
    here = f"{what}: no directory {name!r} here"
    try:
        found = snapshot_download(
            name, allow_patterns=files, ignore_patterns=["*/*"], local_files_only=not online, library_name="forgather"
        )
    except errors.GatedRepoError as error:
        raise SetupError(
            f"{here}, and the model of that name is given on request: ask on {constants.ENDPOINT}/{name}, then log in "
            "with 'hf auth login'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SetupError(
            f"{here}, and no model of that name that {constants.ENDPOINT} shows you; mend the name, or log in with "
            "'hf auth login'"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise SetupError(
            f"{here}, and no whole model of that name in {constants.HF_HUB_CACHE}, while {why}; mend the name, "
            "download it once with a network, or set HF_HOME to a cache that has it"
        ) from error
    except Exception as error:  # of whatever the library connects with, which has changed between its versions
        first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise SetupError(f"{what}: {name} cannot be downloaded ({first}); try again, which continues") from error
    return Path(found)


def can_reach(endpoint: str) -> bool:
    """True if a connection can be opened, or if a proxy stands in between, which would have to be asked."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    url = urlsplit(endpoint)
    if getproxies():
        return True
    reached: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((url.hostname or "", url.port or 443), timeout=_PATIENCE).close()
            reached.append(True)

    thread = threading.Thread(target=connect, daemon=True)  # resolving a name knows no timeout
    thread.start()
    thread.join(_PATIENCE)
    return bool(reached)
