"""The settings of ``forgather diloco server``: a group of their own, with mistakes told as for other settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import saving
import yaml
from program import forgather, refusal

from forgather_cli.checkpoint.rollbacks import Rollback, append_rollback
from forgather_cli.cli.diloco import _composed
from forgather_cli.config.decode import dump_tree
from forgather_cli.config.diloco import load_server_settings, server_settings_text, split_server_overrides
from forgather_cli.config.load import load_config
from forgather_cli.config.options import shipped
from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir


def test_the_shipped_file_holds_every_setting_at_its_default() -> None:
    assert load_server_settings([]) == DilocoServerSettings()
    tree = yaml.safe_load((shipped("conf") / "diloco" / "server.yaml").read_text())
    assert tree == yaml.safe_load(server_settings_text(DilocoServerSettings()))


def test_overrides_of_the_server_beside_those_of_the_recipe(tmp_path: Path) -> None:
    recipe, ours = split_server_overrides(["model=nano", "diloco.workers=3", "diloco.outer.lr=0.9", "max_steps=1"])
    assert recipe == ["model=nano", "max_steps=1"]
    settings = load_server_settings(ours)
    assert (settings.workers, settings.outer.lr, settings.outer.momentum) == (3, 0.9, 0.9)
    (tmp_path / "diloco.yaml").write_text(server_settings_text(settings))
    assert load_server_settings(["diloco.port=0"], tmp_path / "diloco.yaml").workers == 3


def test_what_counts_no_more_is_read_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "diloco.yaml").write_text(server_settings_text(DilocoServerSettings()) + "max_change: 10.0\n")
    assert load_server_settings([], tmp_path / "diloco.yaml") == DilocoServerSettings()
    assert "diloco.max_change: counts no more" in caplog.text
    assert load_server_settings(["diloco.max_share=null", "diloco.round_timeout=null"]).max_share is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("diloco.worker=2", "diloco.worker: unknown setting; did you mean diloco.workers"),
        ("diloco.workers=two", "diloco.workers: must be a whole number, got 'two'"),
        ("diloco.outer.momentum=1", "diloco.outer.momentum: must be less than 1"),
        ("diloco.outer.rate=1", "diloco.outer.rate: unknown setting"),
        ("diloco.outer.delay=2", "diloco.outer.delay: is of diloco.mode=async"),
        ("diloco.num_fragments=3", "diloco.num_fragments: must divide diloco.sync_every=500"),
        ("diloco.overlap=500", "diloco.overlap: must be below the 500 steps"),
        ("diloco.alpha=0.3", "set diloco.overlap"),
        ("diloco.quorum=3", "diloco.quorum: is more than diloco.workers=2"),
        ("diloco.grace=3", "set diloco.quorum"),
        ("diloco.max_share=0.5", "diloco.max_share: must be"),
        ("diloco.max_share=.nan", "diloco.max_share: must be"),
        ("diloco.round_timeout=soon", "diloco.round_timeout: must be"),
        ("diloco.tls_key=k", "set diloco.tls_certificate=FILE"),
        ("diloco.host=0.0.0.0", "diloco.insecure=true"),
        ("diloco=server", "diloco=server: the server's settings are set one by one"),
        ("+diloco.x=1", "write diloco.NAME=VALUE"),
    ],
)
def test_mistakes(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_server_settings([override])
    (problem,) = caught.value.problems
    assert said in problem


@pytest.mark.parametrize("override", ["diloco.workers=2", "diloco.outer.lr=0.9", "diloco=server"])
def test_a_run_has_none_of_them(override: str) -> None:
    with pytest.raises(ConfigError, match="only forgather diloco server has this setting"):
        load_config(None, [override])


def test_a_run_without_a_checkpoint_to_begin_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> str:
        capsys.readouterr()
        assert forgather("diloco", "server", str(tmp_path)) == 2
        return capsys.readouterr().err

    RunDir(tmp_path).config.touch()
    assert "has no checkpoint to begin from" in refused()
    run = saving.saved_run(tmp_path, 1, 2)
    for step in (1, 2):
        (run.checkpoint(step) / "state.json").unlink()
    assert f"{run.checkpoint(1)}: is damaged: state.json is missing" in refused()
    (run.checkpoint(2) / "manifest.json").write_text('{"format": "forgather-checkpoint", "format_version": 7}')
    assert "upgrade forgather" in refused()  # and does not begin from an older one


def test_without_a_recipe_the_words_are_settings_as_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded, settings = _composed(None, ["model=nano", "diloco.workers=3", "max_steps=7"], None)
    assert (loaded.recipe, loaded.config.max_steps, settings.workers) == ("default", 7, 3)
    assert loaded.config.model == load_config("default", ["model=nano"]).config.model
    told = refusal(capsys, "diloco", "server", "model=nano", "diloco.worker=2", "max_step=1")
    assert "diloco.worker: " in told
    assert "max_step: " in told


def test_a_run_is_begun_from_where_a_resume_takes_it(tmp_path: Path) -> None:
    run = saving.saved_run(tmp_path, 1, 2, 3)
    run.config.write_text(dump_tree(load_config("default", []).tree))

    def begun_from() -> str | bool | None:
        return _composed(str(tmp_path), [], None)[0].config.resume_from_checkpoint

    (run.checkpoint(3) / "state.json").unlink()
    assert begun_from() == str(run.checkpoint(2))
    position = [{"epoch": 0, "sample": 3}]
    append_rollback(run, Rollback(1, "2026-01-01T00:00:00+00:00", "x", 3, 1, 2, [5, 6], position))
    assert begun_from() == str(run.checkpoint(1))
