"""``~`` is a home directory in each setting and argument that is a path."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from program import SMALL, forgather, refusal

from forgather_cli import TrainingArguments
from forgather_cli.cli import app
from forgather_cli.cli.style import Command, Group
from forgather_cli.config.decode import dump_saved, load_saved
from forgather_cli.config.diloco import load_server_settings
from forgather_cli.config.load import load_config
from forgather_cli.config.paths import alternatives, settings
from forgather_cli.config.schema import FilePath
from forgather_cli.errors import ConfigError

_PATH = re.compile(r"(_dir|_file|files|\.path|tokenizer|dataset|chat_template|init_from|from_adapter|certificate"
                   r"|tls_key|prompts|loss\.reference|resume_from_checkpoint|accelerate_config"
                   r"|model\.config)$")  # fmt: skip
_OTHER = {"model.replace_tokenizer", "overwrite_output_dir", "callbacks.tasks.apply_chat_template"}


@pytest.fixture(autouse=True)
def _here(own_directory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("home").mkdir()


def _is_path(annotation: Any) -> bool:
    return "_at_home" in str(annotation)


def test_each_setting_that_is_a_path_expands_it() -> None:
    named = {path for path in settings() if _PATH.search(path)} - _OTHER
    assert len(named) > 20
    assert named == {path for path, setting in settings().items() if _is_path(setting.annotation)}
    assert str in alternatives(FilePath)


def test_words_of_the_command_line_and_of_a_saved_config() -> None:
    home = Path("home/x").resolve()
    home.write_text("[a]\n")  # as a file of prompts
    for words, setting in {
        "output_dir=~/x": lambda c: c.output_dir,
        "logging_dir=~/x": lambda c: c.logging_dir,
        "resume_from_checkpoint=~/x": lambda c: c.resume_from_checkpoint,
        "data.tokenizer=~/x": lambda c: c.data.tokenizer,
        "data=text files=[~/x,b]": lambda c: c.data.files[0],
        "data=text 'files=[a,\"~/x\"]'": lambda c: c.data.files[1],
        "data=instruct files=[a] chat_template=~/x": lambda c: c.data.chat_template,
        "data=hf dataset=~/x": lambda c: c.data.dataset,
        "model=pretrained model.path=~/x": lambda c: c.data.tokenizer,
        "model=pretrained model.path=x adapter=lora from_adapter=~/x": lambda c: c.adapter.from_adapter,
        "model=transformers model.config=~/x": lambda c: c.model.config,
        "callbacks.textgen.prompts=~/x": lambda c: c.callbacks.textgen.prompts,
        "++callbacks.profiler.output_dir=~/x": lambda c: c.callbacks.profiler.output_dir,
        "'output_dir=~'": lambda c: f"{c.output_dir}/x",
    }.items():
        loaded = load_config(None, shlex.split(words))
        assert setting(loaded.config) == str(home)
        Path("config.yaml").write_text(dump_saved(loaded.tree).replace(str(home), "~/x"))
        assert setting(load_saved(Path("config.yaml"))) == str(home)


def test_what_is_nobodys_home_is_refused_and_what_is_no_path_stays() -> None:
    with pytest.raises(ConfigError, match=r"output_dir: .*~.*'~nobody-here/x'"):
        load_config(None, ["output_dir='~nobody-here/x'"])
    assert load_config(None, ["callbacks.textgen.prompts=['~/x','a=~b']"]).config.callbacks.textgen is not None
    assert load_config(None, ["output_dir=./~x"]).config.output_dir == "./~x"
    assert TrainingArguments(output_dir="~/x").output_dir == str(Path("home/x").resolve())
    found = load_server_settings(["diloco.token_file=~/t", "diloco.tls_certificate='~/c'", "diloco.tls_key=~/k"])
    files = found.token_file, found.tls_certificate, found.tls_key
    assert files == tuple(str(Path("home", name).resolve()) for name in "tck")


def _commands(command: Any) -> Iterator[Any]:
    """The command itself, or all below the group."""
    if not isinstance(command, Group):
        yield command
        return
    for name in command.list_commands(None):
        yield from _commands(command.get_command(None, name))


def test_each_argument_of_each_command_expands_it() -> None:
    """One class of commands does it; what takes a path says so by its type, or by its name."""
    seen = 0
    for command in _commands(typer.main.get_command(app.app)):
        assert type(command) is Command, command.name
        for name, hint in get_type_hints(command.callback, include_extras=False).items():
            if "Path" not in str(hint):
                continue
            seen += 1
            (param,) = (each for each in command.params if each.name == name)
            arguments = [each for each in command.params if each.param_type_name == "argument"]
            words = ["~/x" if each is param else "x" for each in arguments if each is param or each.required]
            if param not in arguments:
                words += [param.opts[-1], "~/x"]
            got = command.make_context("it", words, resilient_parsing=True).params[name]
            assert (got[0] if isinstance(got, list | tuple) else got) == Path("home/x").resolve(), (command.name, name)
    assert seen > 15


def test_commands_find_what_lies_at_home(capfd: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "max_steps=1", "eval_strategy=no"]
    Path("home/mine.yaml").write_text("defaults: [train, _self_]\noutput_dir: ~/run\n")
    assert forgather("train", "~/mine.yaml", *words) == 0
    assert sorted(os.listdir()) == ["home"]
    assert forgather("eval", "~/run", "--output=~/report.json") == 0
    again = ["max_steps=2", "output_dir=~/again", "resume_from_checkpoint=~/run/checkpoints/step-00000001"]
    assert forgather("train", "~/run", *words, *again) == 0
    assert forgather("config", "diff", "~/run", "~/mine.yaml") in (0, 1)
    assert {"run", "again", "report.json"} <= set(os.listdir("home"))
    assert sorted(os.listdir()) == ["home"]
    capfd.readouterr()
    assert "~nobody-here/run" in refusal(capfd, "eval", "~nobody-here/run")
