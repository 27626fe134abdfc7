"""``forgather config``: what a run is composed of, and what there is to choose from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forgather_cli.cli.output import AsJson, console, print_json
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import ConfigDir, TrustConfig, Words, load
from forgather_cli.errors import ConfigError, SetupError

if TYPE_CHECKING:
    from rich.table import Table

    from forgather_cli.config.load import Loaded

app = typer.Typer(cls=Group, help="The resolved config, groups with their options, and recipes.", no_args_is_help=True)
recipe_app = typer.Typer(cls=Group, help="Recipes of your own.", no_args_is_help=True)


@app.command(cls=Command)
def show(
    words: Words = None, config_dir: ConfigDir = None, trust_config: TrustConfig = False, as_json: AsJson = False
) -> None:
    """Print the resolved config of a recipe or a run, with overrides, as YAML."""
    loaded = load(words, config_dir, trust_config=trust_config)
    if as_json:
        print_json(loaded.tree)
    else:
        print_config(loaded)


def print_config(loaded: Loaded) -> None:
    """The resolved config as YAML, in colour on a terminal."""
    from forgather_cli.config.decode import dump_tree

    text = dump_tree(loaded.tree).rstrip("\n")
    screen = console()
    if not screen.is_terminal:
        typer.echo(text)
        return
    from rich.syntax import Syntax

    screen.print(Syntax(text, "yaml", background_color="default", word_wrap=True))


@app.command(cls=Command)
def options(
    groups: Annotated[
        list[str] | None, typer.Argument(metavar="[GROUP]...", help="Only these groups.", show_default=False)
    ] = None,
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
) -> None:
    """List the config groups with their options: [cyan]group=option[/] chooses one."""
    from forgather_cli.config import options as known

    found = known.groups(config_dir)
    wrong = [group for group in groups or [] if group not in found]
    if wrong:
        raise ConfigError([f"{group}: no such group; groups: {', '.join(found)}" for group in wrong])
    wanted = {group: infos for group, infos in found.items() if not groups or group in groups}
    if as_json:
        print_json({group: [asdict(info) for info in infos] for group, infos in wanted.items()})
        return
    table = _table("group", "option", "")
    for group, infos in wanted.items():
        for n, info in enumerate(infos):
            table.add_row("" if n else group, info.name, info.description, end_section=info is infos[-1])
    console().print(table)


@app.command(cls=Command)
def recipes(config_dir: ConfigDir = None, as_json: AsJson = False) -> None:
    """List the recipes with what they are."""
    from forgather_cli.config import options as known

    found = known.recipes(config_dir)
    if as_json:
        print_json([asdict(info) for info in found])
        return
    table = _table("recipe", "")
    for info in found:
        table.add_row(info.name, info.description)
    console().print(table)


@app.command(cls=Command)
def explain(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="As in an override: learning_rate, packing.")],
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
) -> None:
    """What a setting means, what it takes, and what each option has for it."""
    from forgather_cli.config.explain import explain as explained
    from forgather_cli.config.schema.base import typed

    found = [each for key in keys for each in explained(key, config_dir)]
    if as_json:
        print_json([asdict(each) for each in found])
        return
    for each in found:
        lines = [f"{each.path}: {each.comment}".rstrip(": "), f"  takes {each.takes}"]
        same: dict[str, list[str]] = {}
        for option, value in each.values.items():
            shown = ", ".join(value) if isinstance(value, dict) else typed(value)
            same.setdefault(shown, []).append(option.partition("=")[2] or option)
        group = "" if "train" in each.values else f"{each.path.partition('.')[0]}="
        lines += [f"  {value}  ({group}{'|'.join(names)})" for value, names in same.items()]
        typer.echo("\n".join(lines))


@recipe_app.callback()
def _recipe() -> None: ...


@recipe_app.command("copy", cls=Command)
def copy_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A shipped recipe's name.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where you will edit it: ./recipes/mine.yaml.")],
    config_dir: ConfigDir = None,
) -> None:
    """Put a recipe where you edit it."""
    from forgather_cli.config import options as known
    from forgather_cli.input_files import read_text, write_whole

    text = read_text(known.find_recipe(name, known.search_path(config_dir), Path.cwd()), ConfigError)
    if file.suffix != ".yaml":
        raise ConfigError(f"FILE: a recipe is a .yaml file, got {file}; give {file.with_suffix('.yaml')}")
    if file.exists():
        raise ConfigError(f"FILE: {file} exists already; give another name, or remove it")
    by_name = file.parent.resolve() == Path("recipes").resolve()
    if by_name and file.stem in {info.name for info in known.recipes(config_dir)}:
        raise ConfigError(f"FILE: there is a recipe {file.stem} already, got {file}; give another name")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    except OSError as error:
        raise SetupError(f"{file}: {error.strerror}; give a file in a folder that you may write") from error
    typer.echo(f"train it with: forgather train {file.stem if by_name else file.parent / file.name}")


def _table(*titles: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for n, title in enumerate(titles):
        table.add_column(title, style=("bold", "cyan", "")[n] if len(titles) == 3 else ("cyan", "")[n])
    return table
