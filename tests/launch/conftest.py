from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from program import forgather
from two_ranks import RUN, SMALL

from forgather_cli.run_dir import RunDir


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are made in the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        assert forgather("train", *SMALL, "max_steps=3", "save_steps=1") == 0
    return folder / "run"


@pytest.fixture
def used(trained: Path) -> RunDir:
    """A run of three steps, in the working directory."""
    shutil.copytree(trained, RUN.root)
    return RUN
