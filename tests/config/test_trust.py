"""A directory of somebody else's: what its config.yaml names is imported only where the user says so."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from program import SMALL, forgather, refusal

OTHER_DATA = ["data=text", "data.files=[ok.txt]", "seq_len=16", "cache_dir=cache"]

PLANTED = """
from pathlib import Path
from users_parts import Rows, Words as Net

Path("ran").touch()


def data():
    return {"train": Rows(""), "eval": [Rows("")[0]] * 4, "seq_len": 16, "tokenizer": "bytes"}


def untold():
    return {key: value for key, value in data().items() if key != "tokenizer"} | {"vocab_size": 260}
"""

COMMANDS = [
    ["eval", "RUN"],
    ["eval", "RUN", *OTHER_DATA],
    ["finalize", "RUN", "model"],
    ["generate", "RUN", "--prompt", "a", "--max-new-tokens", "1"],
    ["plan", "RUN"],
    ["plan", "RUN/config.yaml"],
    ["checkpoint", "list", "RUN"],
    ["checkpoint", "verify", "RUN/checkpoints/step-00000001"],
    ["checkpoint", "inspect", "RUN/checkpoints/step-00000001"],
    ["checkpoint", "edit", "RUN", "weight_decay=0.5"],
    ["logs", "summary", "RUN"],
]


@pytest.fixture(scope="module")
def run_of_one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "RUN"
    assert forgather("train", *SMALL, "max_steps=1", f"output_dir={run}") == 0
    return run


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory with a text and a module that leaves a trace when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    Path("planted.py").write_text(PLANTED)
    Path("ok.txt").write_text("some text of mine\n" * 200)
    yield tmp_path
    sys.modules.pop("planted", None)


@pytest.fixture
def run(planted: Path, run_of_one_step: Path) -> Path:
    shutil.copytree(run_of_one_step, "RUN")
    return Path("RUN")


def change(run: Path, **groups: Any) -> None:
    """Other groups in a run's config.yaml."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**tree, **groups}))


IMPORTS = {"_target_": "forgather_cli.targets.import_module", "name": "planted"}
RUNS = {"_target_": "os.system", "command": "touch ran"}
OWN = {"_target_": "planted.Net", "weight_decay": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "data": {"data": IMPORTS},
    "model": {"model": RUNS},
    "trainer": {"trainer": IMPORTS},
    "loss": {"loss": RUNS},
    "optimizer": {"optimizer": IMPORTS},
    "its groups": {"optimizer": {"type": "adamw", "groups": {"all": {"regex": ".*", "optimizer": OWN}}}},
    "lr_scheduler": {"lr_scheduler": RUNS},
    "callbacks": {"callbacks": {"mine": IMPORTS}},
    "trackers": {"callbacks": {"trackers": {"names": ["planted.Net"]}}},
}
CONFIGS["all"] = {group: value for config in CONFIGS.values() for group, value in config.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_config_runs_nothing(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command where every group has code; where one has, those that read the groups one by one."""
    change(run, **CONFIGS[name])
    one_by_one = [["eval", "RUN"], ["plan", "RUN"], ["checkpoint", "edit", "RUN", "weight_decay=0.5"]]
    for command in COMMANDS if name == "all" else one_by_one:
        code = forgather(*command)
        said = capsys.readouterr().err
        assert not Path("ran").exists(), command
        assert "planted" not in sys.modules, command
        assert code in (0, 2), (command, said)
        assert code == 0 or "--trust-config" in said, (command, said)
        shutil.rmtree("model", ignore_errors=True)


def test_data_of_the_runs_own(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["model=nano", "callbacks=minimal", "device=cpu", "max_steps=1", "data._target_=planted.data"]
    assert forgather("train", *own, "output_dir=RUN") == 0
    Path("ran").unlink()
    sys.modules.pop("planted")
    said = refusal(capsys, "eval", "RUN")
    assert all(word in said for word in ("data:", "planted.data", "data=text", "--trust-config"))
    assert forgather("eval", "RUN", *OTHER_DATA) == 0
    assert forgather("finalize", "RUN", "model") == 0
    assert "a built-in text" in (said := capsys.readouterr().err)
    assert "--trust-config" in said
    assert not Path("ran").exists()
    assert forgather("eval", "RUN", "--trust-config") == 0
    assert Path("ran").exists()
    assert forgather("finalize", "RUN", "model2", "--trust-config") == 0
    report = json.loads(Path("model2/finalize_report.json").read_text())
    assert report["proof"]["sample"] == "the run's evaluation split"
    assert forgather("plan", "RUN", "--trust-config") == 0
    assert forgather("resume", "RUN", "max_steps=2") == 0


def test_a_model_of_the_runs_own(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("train", *SMALL[1:], "max_steps=1", "model._target_=planted.Net", "output_dir=RUN") == 0
    Path("ran").unlink()
    sys.modules.pop("planted")
    commands = (["eval", "RUN"], ["generate", "RUN", "--prompt", "a", "--max-new-tokens", "1"])
    for command in commands:
        said = refusal(capsys, *command)
        assert "--trust-config" in said
        assert "model._target_" in said
        assert not Path("ran").exists()
    for command in commands:
        assert forgather(*command, "--trust-config") == 0


def test_a_model_and_data_of_the_runs_own_without_a_tokenizer(planted: Path) -> None:
    own = ["model._target_=planted.Net", "data._target_=planted.untold", "callbacks=minimal", "device=cpu"]
    assert forgather("train", *own, "max_steps=1", "output_dir=RUN") == 0
    assert forgather("eval", "RUN", "--trust-config") == 0


def test_a_directory_with_config_json_is_a_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("finalize", "RUN", "model") == 0
    shutil.copy("RUN/config.yaml", "model/config.yaml")
    change(Path("model"), data=IMPORTS)
    assert forgather("eval", "model", *OTHER_DATA, "max_eval_samples=2") == 0
    assert forgather("finalize", "model", "again") == 0
    assert "belongs to no run" in capsys.readouterr().err
    assert "config.json" in refusal(capsys, "resume", "model")
    assert "planted" not in sys.modules


def test_a_saved_config_does_not_read_the_environment(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    data = {"type": "hf", "path": "https://example.invalid/${oc.env:MY_SECRET}"}
    change(run, data=data, logging_dir="${oc.env:MY_SECRET}")
    said = refusal(capsys, "eval", "RUN")
    assert "hunter2" not in said
    assert all(word in said for word in ("${oc.env:MY_SECRET}", "--trust-config"))
    assert forgather("eval", "RUN", *OTHER_DATA) == 0
