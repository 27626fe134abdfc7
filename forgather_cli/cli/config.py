"""``forgather config``: what a run is composed of, and what there is to choose from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.output import AsJson, Col, console, print_facts, print_json, print_table
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import ConfigDir, TrustConfig, Words, load, saved_config
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded

app = typer.Typer(cls=Group, help="The resolved config, groups with their options, and recipes.", no_args_is_help=True)
recipe_app = typer.Typer(cls=Group, help="Recipes of your own.", no_args_is_help=True)

RecipeOrRun = Annotated[
    str, typer.Argument(metavar="RUN_OR_RECIPE", help="A run, or a recipe's name or file.", show_default=False)
]


@app.command(cls=Command)
def show(
    words: Words = None, config_dir: ConfigDir = None, trust_config: TrustConfig = False, as_json: AsJson = False
) -> None:
    """Print the resolved config of a recipe or a run, with overrides, as YAML."""
    loaded = load(words, config_dir, trust_config=trust_config)
    if as_json:
        print_json(loaded.tree)
    else:
        for note in loaded.notes:
            typer.echo(f"# {note}")
        print_config(loaded)


def print_config(loaded: Loaded) -> None:
    """The resolved config as YAML, in colour on a terminal."""
    from forgather_cli.config.decode import dump_tree, with_comments
    from forgather_cli.config.options import named

    sources = {path: named(file) for path, file in loaded.sources().items()}
    text = with_comments(dump_tree(loaded.tree), sources).rstrip("\n")
    screen = console()
    if not screen.is_terminal:
        typer.echo(text)
        return
    from rich.syntax import Syntax

    coloured = Syntax(text, "yaml", background_color="default").highlight(text)
    coloured.rstrip()
    screen.print(coloured, soft_wrap=True)


@app.command(cls=Command)
def diff(
    first: RecipeOrRun,
    second: RecipeOrRun,
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the settings that differ between two runs or recipes, with defaults and options resolved.

    Of a run as it was saved: nothing that its config names is imported. A dash: has no such setting.
    """
    from forgather_cli.config.decode import load_tree
    from forgather_cli.config.load import load_config
    from forgather_cli.config.paths import walk
    from forgather_cli.config.schema.base import typed

    sides: list[dict[str, Any]] = []
    for name in (first, second):
        saved = saved_config(name)
        tree = load_tree(saved) if saved else load_config(name, [], config_dir=config_dir).tree
        sides.append(dict(walk({**tree, "output_dir": None}, lists=False)))  # each run has one of its own
    paths = [path for path in sides[0] | sides[1] if sides[0].get(path, ...) != sides[1].get(path, ...)]
    if as_json:
        named = list(zip(("first", "second"), sides, strict=True))
        print_json({path: {name: side[path] for name, side in named if path in side} for path in paths})
    elif paths:
        columns = (Col("setting", style="cyan"), Col("first", copied=True), Col("second", copied=True))
        rows = [(path, *(typed(side[path]) if path in side else "-" for side in sides)) for path in paths]
        print_facts({"first": Path(first), "second": Path(second)})
        print_table(columns, rows)
    else:
        typer.echo("no setting differs")


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
    columns = (Col("group", style="bold"), Col("option", style="cyan"), Col("description", fold=True))
    rows = [(group, info.name, info.description) for group, infos in wanted.items() for info in infos]
    print_table(columns, rows)


@app.command(cls=Command)
def recipes(config_dir: ConfigDir = None, as_json: AsJson = False) -> None:
    """List the recipes with what they are."""
    from forgather_cli.config import options as known

    found = known.recipes(config_dir)
    if as_json:
        print_json([asdict(info) for info in found])
        return
    columns = (Col("recipe", style="cyan", fold=True), Col("description", fold=True))
    print_table(columns, [(info.name, info.description) for info in found])


@app.command(cls=Command)
def explain(
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY...", help="As in an override: learning_rate, packing, precision.")
    ],
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
) -> None:
    """What a setting means, what it takes, and what each option has for it.

    Of a group: its options, which recipe chooses which, and the settings they have.
    """
    from forgather_cli.config.explain import ExplainedGroup
    from forgather_cli.config.explain import explain as explained
    from forgather_cli.config.schema.base import typed

    found = [each for key in keys for each in explained(key, config_dir)]
    if as_json:
        print_json([asdict(each) for each in found])
        return
    for each in found:
        if isinstance(each, ExplainedGroup):
            recipes: dict[str, list[str]] = {}
            for recipe, option in each.recipes.items():
                recipes.setdefault(option, []).append(recipe)
            tell(f"{each.path}: a config group; {each.path}=NAME chooses one of its options")
            facts = {f"{each.path}={info.name}": info.description for info in each.options}
            facts["recipes"] = "; ".join(f"{option}: {', '.join(names)}" for option, names in recipes.items())
            facts["files"] = ", ".join(dict.fromkeys(str(info.file.parent) for info in each.options))
            print_facts({label: text for label, text in facts.items() if text})
            print_facts({name: text for name, text in each.settings.items() if text})
            continue
        lines = [f"{each.path}: {each.comment}".rstrip(": "), f"  takes {each.takes}"]
        says = each.values | each.recipes
        shown = {key: ", ".join(value) if isinstance(value, dict) else typed(value) for key, value in says.items()}
        same: dict[str, list[str]] = {}
        for option in each.values:
            same.setdefault(shown[option], []).append(option.partition("=")[2] or f"conf/{option}.yaml")
        group = "" if "train" in each.values else f"{each.path.partition('.')[0]}="
        lines += [f"  {value}  ({group}{'|'.join(names)})" for value, names in same.items()]
        lines += [f"  {shown[file]}  set in {file}" for file in each.recipes]
        tell("\n".join(lines))


@recipe_app.callback()
def _recipe() -> None: ...


@recipe_app.command("copy", cls=Command)
def copy_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A shipped recipe's name.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where you will edit it: ./recipes/mine.yaml.")],
    config_dir: ConfigDir = None,
) -> None:
    """Put a recipe where you edit it: all that it says, and what most people change, with comments."""
    from forgather_cli.config import options as known
    from forgather_cli.config.explain import to_edit
    from forgather_cli.documents.regular_files import write_whole

    text = to_edit(name, known.search_path(config_dir))
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
    tell(f"train it with: forgather train {file.stem if by_name else file.parent / file.name}")
