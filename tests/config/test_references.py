"""What should not be written down: references to the environment, and the token of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from program import Process, document, forgather, refusal, write

from forgather_cli.config.decode import dump_tree, load_saved
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import ControlSettings
from forgather_cli.errors import ConfigError

SMALL = ["model=nano", "seq_len=16", "global_batch_size=4", "logging_steps=1", "device=cpu", "max_steps=1"]
DATA = ["data=synthetic", "num_samples=64", "num_eval_samples=4"]
TOKEN = "0123456789abcdef-of-mine"
RECIPE = """# Reads the environment.
defaults:
  - train
  - override model: nano
  - override data: text
  - _self_
data:
  files: ["${oc.env:MY_FOLDER}/a.txt"]
  cache_dir: cache
  seq_len: 16
max_steps: ${oc.decode:${oc.env:MY_STEPS}}
save_steps: ${max_steps}
global_batch_size: 4
device: cpu
callbacks:
  textgen:
    prompts: ["a \\\\${HOME} b"]
    max_new_tokens: 2
  trackers:
    names: [tensorboard]
    init_kwargs: {tensorboard: {comment: "${oc.env:MY_SECRET}"}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("folder/a.txt", "some text of mine\n" * 100)
    write("mine.yaml", RECIPE)
    for name, value in {"MY_FOLDER": f"{tmp_path}/folder", "MY_STEPS": "2", "MY_SECRET": "hunter2"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def files_with(word: str, root: Path) -> list[str]:
    return [str(path) for path in root.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


def test_references_stay_as_typed_and_are_resolved_at_each_load(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config("./mine.yaml", [])
    assert loaded.config.max_steps == loaded.config.save_steps == 2
    assert loaded.tree["max_steps"] == "${oc.decode:${oc.env:MY_STEPS}}"
    assert loaded.tree["save_steps"] == "${max_steps}"
    assert loaded.tree["data"]["files"] == ["${oc.env:MY_FOLDER}/a.txt"]
    assert "hunter2" not in dump_tree(loaded.tree)
    Path("config.yaml").write_text(dump_tree(loaded.tree))
    again = load_saved(Path("config.yaml"))
    assert again == loaded.config
    assert again.callbacks.textgen.prompts == ["a ${HOME} b"]
    monkeypatch.setenv("MY_STEPS", "7")
    assert load_saved(Path("config.yaml")).save_steps == 7


def test_a_run_keeps_them_in_all_that_it_writes(here: Path) -> None:
    words = ["callbacks.trackers=null", "callbacks.info.verbose=true", "data.text_key=${oc.env:MY_SECRET}"]
    write("held.jsonl", '{"hunter2": "some more text of mine"}\n')
    assert forgather("train", "./mine.yaml", *words, "data.eval_files=[held.jsonl]", "output_dir=run") == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["data"]["text_key"] == "${oc.env:MY_SECRET}"
    assert files_with("hunter2", here / "run") == []
    assert files_with("${oc.env:MY_SECRET}", here / "run/tensorboard") != []
    assert forgather("resume", "run", "max_steps=3") == 0
    assert yaml.safe_load(Path("run/config.1.yaml").read_text())["data"]["text_key"] == "${oc.env:MY_SECRET}"


def test_missing_variables_are_mistakes_reported_together(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.yaml").write_text(dump_tree(load_config("./mine.yaml", []).tree))
    monkeypatch.delenv("MY_FOLDER")
    monkeypatch.delenv("MY_SECRET")
    said = refusal(capsys, "train", "./mine.yaml", "learning_rat=1")
    for path, name in {"data.files": "MY_FOLDER", "callbacks.trackers.init_kwargs": "MY_SECRET"}.items():
        assert f"environment variable {name} is not set" in said
        assert path in said
    assert "learning_rat" in said
    with pytest.raises(ConfigError) as raised:
        load_saved(Path("config.yaml"))
    assert len(raised.value.problems) == 2
    assert all("config.yaml" in problem for problem in raised.value.problems)


def test_a_token_is_written_nowhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("token").write_text(TOKEN + "\n")
    write("recipes/own.yaml", f"# Own.\ndefaults: [train, _self_]\ncallbacks: {{control: {{auth_token: {TOKEN}}}}}\n")
    typed = f"callbacks.control.auth_token={TOKEN}"
    for run, words in {
        "direct": [typed], "ddp": [typed, "trainer=ddp"], "file": ["callbacks.control.auth_token_file=token"],
        "recipe": ["own"],
    }.items():  # fmt: skip
        words = ["train", *words, *SMALL, *DATA, f"output_dir={run}"]
        if run == "ddp":
            with Process(*words) as job:
                assert job.finish() == 0, job.output
        else:
            assert forgather(*words) == 0
        assert files_with(TOKEN, here / run) == []
        control = yaml.safe_load(Path(run, "config.yaml").read_text())["callbacks"]["control"]
        assert (control["auth_token"], control["auth_token_file"]) == (None, "token" if run == "file" else None)
    assert "***" in Path("direct/origin.yaml").read_text()
    assert "FORGATHER_AUTH_TOKEN" not in os.environ
    assert document(capsys, "config", "show", typed)["callbacks"]["control"]["auth_token"] is None


def test_mistakes_of_a_token(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("short").write_text("short\n")
    for overrides, said in {
        "auth_token_file=none": "callbacks.control.auth_token_file: none",
        "auth_token_file=short": "callbacks.control.auth_token_file: short",
        f"auth_token_file=short auth_token={TOKEN}": "auth_token: excludes",
        "auth_token_file=short disable_auth=true": "auth_token_file: nothing reads it",
    }.items():
        words = [f"callbacks.control.{word}" for word in overrides.split()]
        assert said in refusal(capsys, "train", *SMALL, *DATA, *words, "output_dir=new")
        assert not Path("new").exists()


def test_the_environment_gives_a_token(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ControlSettings().given_token() is None
    monkeypatch.setenv("FORGATHER_AUTH_TOKEN", TOKEN)
    assert ControlSettings().given_token() == TOKEN
    Path("token").write_text("another-0123456789abcdef")
    assert ControlSettings(auth_token_file="token").given_token() == "another-0123456789abcdef"
