"""The words of a command line, RECIPE, OVERRIDEs and SOURCE: read to configs, completed in the shell, and declared."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.config.options import GROUPS
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.run_dir import RunDir, run_of, step_of
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded


def is_override(word: str) -> bool:
    """True for ``key=value`` in any of Hydra's forms and ``~key``; else the word can only be a recipe or a run.

    Sweeps name runs by what they change: ``outputs/default/sweep-1/learning_rate=0.001``.
    """
    is_run = "/" in word.partition("=")[0] and Path(word).exists()
    return not is_run and ("=" in word or word.startswith("~"))


def split_words(words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The recipe, if one is named, and the overrides. Raises ConfigError for a second recipe."""
    named = [word for word in words or [] if not is_override(word)]
    if len(named) > 1:
        hint = f"write key=value (the recipe is {named[0]})"
        raise ConfigError([f"{word}: not an override; {hint}" for word in named[1:]])
    return (named[0] if named else None), [word for word in words or [] if is_override(word)]


def check_overrides(words: Sequence[str] | None) -> list[str]:
    """The words, all of which must be overrides. Raises ConfigError for others."""
    wrong = [word for word in words or [] if not is_override(word)]
    if wrong:
        raise ConfigError([f"{word}: not an override; write key=value" for word in wrong])
    return list(words or [])


def quoted(path: Path | str) -> str:
    """A path, or a pattern of some, as a value in Hydra's grammar."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def load(words: Sequence[str] | None, config_dir: Path | None, *, trust_config: bool) -> Loaded:
    """The config that the words of a command line stand for, checked. Raises ConfigError."""
    return load_config_of(*split_words(words), config_dir, trust_config=trust_config)


def load_config_of(recipe: str | None, overrides: list[str], config_dir: Path | None, *, trust_config: bool) -> Loaded:
    """Of a recipe, or of a run given by its directory or a ``config.yaml`` of it: then for a new run with its settings,
    which goes to a directory of its own. Raises ConfigError.
    """
    from forgather_cli.config.decode import load_tree
    from forgather_cli.config.load import load_config, load_resumed

    saved = None if recipe is None else saved_config(recipe)
    if saved is None:
        return load_config(recipe, overrides, config_dir=config_dir)
    reads = None if trust_config else GROUPS
    new: dict[str, Any] = {"output_dir": None, "overwrite_output_dir": False}
    if load_tree(saved).get("resume_from_checkpoint") is True:  # a later start of the run; a path is where it began
        new["resume_from_checkpoint"] = False
    return load_resumed(saved, overrides, config_dir=config_dir, edited=new, reads=reads)


def saved_config(recipe: str) -> Path | None:
    """The ``config.yaml`` that ``recipe`` means if that is a run, by its directory or a config of it."""
    path = Path(recipe)
    run = run_of(path) if path.is_dir() and step_of(path) is None else None
    is_saved = re.fullmatch(r"config(\.\d+)?\.yaml", path.name)
    return run.newest_config() if run is not None else path if is_saved else None


def or_latest(ctx: typer.Context, value: Any) -> Any:
    """Of a path, or each of a list: for ``latest`` the run below ``outputs`` that changed last, said on standard error.

    Raises SetupError where there is none. A directory of that name is itself.
    """
    if isinstance(value, list):
        return [or_latest(ctx, each) for each in value]
    if ctx.resilient_parsing or value is None or str(value) != "latest" or Path(value).exists():
        return value
    from forgather_cli.runs.find import newest_run

    with doing("looking for the newest run"):
        found = newest_run().root
    tell(f"latest: {found}", sys.stderr)
    return found


def local_source(source: Path) -> Path:
    """A run, a checkpoint or a model directory: ``source``, or the files of the hub's model of that name, downloaded.

    Raises SetupError.
    """
    from forgather_cli.hub import is_hub_name, local_model

    if is_hub_name(str(source)):
        source = local_model(str(source), "SOURCE")
    if not source.is_dir():
        raise SetupError(f"{source}: no such directory; give a run, a checkpoint or a model directory")
    marks = ("config.yaml", "manifest.json", "config.json", "adapter_config.json")
    if not any((source / mark).exists() for mark in marks):
        raise SetupError(
            RunDir(source).note_set_aside()
            or f"{source}: is no run (config.yaml), no checkpoint (manifest.json), no model directory (config.json) "
            "and no adapter (adapter_config.json)"
        )
    return source


# ---------------------------------------------------------------------------------------------- completion in the shell


Candidate = tuple[str, str]
"""A possible word, and its description."""


def complete_words(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """Completions of RECIPE or OVERRIDE: recipes, settings, options of a group."""
    return _completions(ctx, "words", incomplete)


def complete_override(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """Completions of OVERRIDE: settings and options of a group, no recipes."""
    return _completions(ctx, "overrides", incomplete)


def _completions(ctx: typer.Context, argument: str, incomplete: str) -> list[Candidate]:
    """Completions of ``incomplete`` after the words in ``argument``, those of the user's ``--config-dir`` included."""
    with contextlib.suppress(Exception):  # a broken recipe must not print into the user's prompt
        from forgather_cli.config.complete import complete

        candidates = partial(complete, config_dir=ctx.params.get("config_dir"))
        words, incomplete, given = _joined(list(ctx.params.get(argument) or []), incomplete, candidates)
        found = candidates(incomplete, words)
        if argument == "overrides":
            found = [(text, about) for text, about in found if is_override(text)]
        return [(text[given:], about) for text, about in found]
    return []


def _joined(
    words: list[str], incomplete: str, candidates: Callable[[str, list[str]], list[Candidate]]
) -> tuple[list[str], str, int]:
    """Undo bash's splitting at ``=`` (COMP_WORDBREAKS): ``["model", "="], "na"`` is ``model=na``.

    Of a word that ends with ``=`` bash passes only the key, so a last word without ``=`` is joined if it is a setting.
    The number returned: how many characters of the joined word the shell already has and wants left out.
    """
    if len(words) >= 2 and words[-1] == "=":
        return words[:-2], f"{words[-2]}={incomplete}", len(words[-2]) + 1
    if not incomplete and words and "=" not in words[-1] and candidates(f"{words[-1]}=", words[:-1]):
        return words[:-1], f"{words[-1]}=", len(words[-1]) + 1
    return words, incomplete, 0


# ------------------------------------------------------------------------------------ arguments and options of commands


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [OVERRIDE]...",
        help="A recipe's name or file, or a run to train again, and settings as [cyan]key=value[/], "
        "[cyan]group=option[/], [cyan]+key=value[/], [cyan]~key[/].",
        autocompletion=complete_words,
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OVERRIDE]...",
        help="Settings to change, as [cyan]key=value[/] or [cyan]group=option[/].",
        autocompletion=complete_override,
        show_default=False,
    ),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder with your groups and recipes, beside ./conf and ./recipes."),
]
RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR",
        help="The run's directory; latest: the run below outputs that changed last.",
        callback=or_latest,
        show_default=False,
    ),
]
SourcePath = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A run (its newest checkpoint), a checkpoint, a model directory, or a model of the Hugging Face hub "
        "(OWNER/NAME); latest: the newest run here.",
        callback=or_latest,
        show_default=False,
    ),
]
TrustConfig = Annotated[
    bool,
    typer.Option(
        "--trust-config",
        help="Run what the run's saved config names by [cyan]_target_[/], and let it read your environment.",
    ),
]
