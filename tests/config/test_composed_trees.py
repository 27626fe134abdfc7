"""What every shipped option and recipe composes to stays what it was: ``composed_trees.json`` has it.

The option files of ``conf/`` are written by ``scripts/options``; here a value that drifts is named. Of a change that is
meant: ``PYTHONPATH=tests .venv/bin/python tests/config/test_composed_trees.py`` writes it anew, its diff says what.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from test_recipes import NEEDS

from forgather_cli.config.compose import compose
from forgather_cli.config.load import load_config
from forgather_cli.config.options import GROUPS, SERVER, search_path, shipped
from forgather_cli.config.paths import walk
from forgather_cli.config.recipe import read_recipe

FILE = Path(__file__).parent / "composed_trees.json"
Leaves = dict[str, Any]


def leaves(tree: Any) -> Leaves:
    return {path: value for path, value in walk(tree, lists=False) if path not in ("output_dir", "recipe")}


def composed(choices: list[str], primary: str = "train", nodes: dict[str, Any] | None = None) -> Leaves:
    """By path what the files say, ``???`` and ``${...}`` as they stand there."""
    config, _ = compose(primary, nodes or {}, choices, search_path(cwd=Path("/")))
    return leaves(OmegaConf.to_container(config, resolve=False))


def as_written(name: str) -> Leaves:
    recipe = read_recipe(name, search_path(cwd=Path("/")), Path("/"))
    return composed([], recipe.primary, recipe.nodes)


def changes(base: Leaves, tree: Leaves) -> Leaves:
    """By path what differs from ``base``; ``GONE`` where the tree lacks it."""
    found = {path: value for path, value in tree.items() if path not in base or repr(base[path]) != repr(value)}
    return found | dict.fromkeys(base.keys() - tree.keys(), "GONE")


def trees(cwd: Path) -> dict[str, dict[str, Leaves]]:
    """Of ``train``, ``default`` and the DiLoCo server all; of options and recipes what differs from the first two."""
    conf = shipped("conf")
    options = sorted(f"{group}={file.stem}" for group in GROUPS for file in (conf / group).glob("*.yaml"))
    names = sorted(file.stem for file in shipped("recipes").glob("*.yaml"))
    (cwd / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    words = {**NEEDS, "pretrain_1b_accelerate": [f"accelerate_config={cwd}/fsdp.yaml"]}
    configs = {name: leaves(load_config(name, words.get(name, []), cwd=cwd).tree) for name in names}
    del configs["pretrain_1b_accelerate"]["trainer.accelerate_config"]  # in a folder of the test
    train, default = composed([]), as_written("default")
    return {
        "whole": {
            "train": train, "default": default, "default, checked": configs["default"],
            "diloco=server": leaves(yaml.safe_load((conf / SERVER / "server.yaml").read_text())),
        },
        "options": {option: changes(train, composed([option])) for option in options},
        "recipes": {name: changes(default, as_written(name)) for name in names},
        "recipes, checked": {name: changes(configs["default"], config) for name, config in configs.items()},
    }  # fmt: skip


def differences(now: dict[str, dict[str, Leaves]]) -> list[str]:
    """What is other than ``FILE`` says; options and recipes that it does not know are new, and none."""
    found = []
    for part, known in json.loads(FILE.read_text()).items():
        for name, old in known.items():
            new = json.loads(json.dumps(now[part].get(name, {})))
            for path in sorted(old.keys() | new.keys()):
                was, is_now = old.get(path, "as train or default has it"), new.get(path, "as train or default has it")
                if was != is_now or isinstance(was, bool) != isinstance(is_now, bool):
                    found.append(f"{part} {name}: {path} was {was!r}, is {is_now!r}")
    return found


def test_what_is_composed_is_what_it_was_and_a_value_that_drifts_is_named(tmp_path: Path) -> None:
    now = trees(tmp_path)
    found = differences(now)
    assert not found, "\n".join(found)
    now["options"]["lr_scheduler=transformers"]["lr_scheduler.reference_lr"] = 1.0
    del now["recipes"]["qat"]["save_steps"]
    assert [line.partition(" was ")[0] for line in differences(now)] == [
        "options lr_scheduler=transformers: lr_scheduler.reference_lr", "recipes qat: save_steps",
    ]  # fmt: skip


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = trees(Path(folder))
    lines = {
        part: ",\n".join(f"  {json.dumps(name)}: {json.dumps(each, sort_keys=True)}" for name, each in of.items())
        for part, of in found.items()
    }
    parts = [f" {json.dumps(part)}: {{\n{text}\n }}" for part, text in lines.items()]
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")
