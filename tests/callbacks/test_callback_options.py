"""The options under ``conf/callbacks``: what each holds, and every callback added and removed by one override."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from forgather_cli.callbacks.build import FACTORIES, build_callbacks
from forgather_cli.config import options
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import CallbackSettings, Config
from forgather_cli.run_dir import RunDir

CALLBACKS = options.shipped("conf") / "callbacks"
NAMES = [field.name for field in dataclasses.fields(CallbackSettings) if field.name != "custom"]
NEEDS_A_PACKAGE = {"trackers"}


def settings_of(name: str) -> Any:
    """The class of a callback's settings."""
    return get_args(get_type_hints(CallbackSettings)[name])[0]


def config(*overrides: str) -> Config:
    return load_config(None, list(overrides)).config


def active(callbacks: CallbackSettings) -> set[str]:
    return {name for name in NAMES if getattr(callbacks, name) is not None}


def raw(option: str) -> dict[str, Any]:
    """What an option's file holds, with that of the file it starts from."""
    tree = yaml.safe_load((CALLBACKS / f"{option}.yaml").read_text())
    parents = [parent for parent in tree.pop("defaults", []) if parent != "_self_"]
    return {**{name: entry for parent in parents for name, entry in raw(parent).items()}, **tree}


def test_the_options() -> None:
    full, default, minimal = (
        active(config(f"callbacks={option}").callbacks) for option in ("full", "default", "minimal")
    )
    assert minimal < default < full
    assert full == set(NAMES) - NEEDS_A_PACKAGE
    assert {"control", "divergence"} <= default


def test_every_callback_can_be_built_in_the_order_of_events(tmp_path: Path) -> None:
    assert set(FACTORIES) == set(NAMES)
    built = [name for name, _ in build_callbacks(config("callbacks=full").callbacks, RunDir(tmp_path), config_tree={})]
    assert built == [name for name in FACTORIES if name not in NEEDS_A_PACKAGE]
    shown, acts = built.index("json"), built.index("early_stopping")
    assert max(built.index(name) for name in ("metrics", "weight_norm", "peak_memory")) < shown < acts
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_each_is_added_by_one_override_with_its_defaults(name: str, tmp_path: Path) -> None:
    callbacks = config("~callbacks", f"+callbacks.{name}={{}}").callbacks
    assert active(callbacks) == {name}
    assert getattr(callbacks, name) == settings_of(name)()
    [(built, _)] = build_callbacks(callbacks, RunDir(tmp_path))
    assert built == name


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_A_PACKAGE])
def test_each_is_removed_by_one_override(name: str) -> None:
    full = active(config("callbacks=full").callbacks)
    assert active(config("callbacks=full", f"~callbacks.{name}").callbacks) == full - {name}
    assert active(config("callbacks=full", f"callbacks.{name}=null").callbacks) == full - {name}


@pytest.mark.parametrize("option", ["default", "full", "minimal"])
def test_an_option_shows_every_setting_with_a_comment(option: str) -> None:
    for name, entry in raw(option).items():
        assert set(entry) == {field.name for field in dataclasses.fields(settings_of(name))}, name
    text = (CALLBACKS / f"{option}.yaml").read_text().splitlines()
    assert text[0].startswith("# ")
    bare = [line for line in text if line.startswith("  ") and "- " not in line and "#" not in line]
    assert not [line for line in bare if not line.rstrip().endswith(":")], bare


def test_full_has_the_defaults_of_the_settings() -> None:
    """A callback added by an override alone is the one of the option, but for what the default recipe needs shorter."""
    entries = raw("full")
    own = {"textgen": {"max_new_tokens"}, "divergence": {"threshold", "patience"}}
    for name, entry in entries.items():
        defaults = dataclasses.asdict(settings_of(name)())
        assert {key for key in entry if entry[key] != defaults[key]} == own.get(name, set()), name
