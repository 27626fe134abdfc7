"""What quickstart, test and check install, and from where, with pip as it is and two indexes of our own."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "environment"
BACKEND = """
import os, shutil
def _wheel(directory, settings=None, metadata=None):
    return os.path.basename(shutil.copy("forgather/forgather-1-py3-none-any.whl", directory))
build_editable = build_wheel = _wheel
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def add_wheel(index: Path, name: str, version: str, requires: str = "") -> None:
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}_from.txt", index.name)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The folder as a package index: its URL, and the paths that were asked for."""
    asked: list[str] = []

    class Index(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", asked
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose ``python3 -m venv`` copies an environment: putting pip into each takes seconds."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder / "environment", with_pip=True)
    (folder / "python3").write_text(f'#!/bin/sh\n[ "$1 $2" = "-m venv" ] && cp -a {folder}/environment "$3"\n')
    (folder / "python3").chmod(0o755)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, made_once: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of ours that needs torch and another, under constraints; both indexes have newer ones than these."""
    monkeypatch.setenv("PATH", str(made_once), prepend=os.pathsep)
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    (root / "scripts" / "environment").write_text(SCRIPT.read_text())
    (root / "scripts" / "constraints.txt").write_text("# written\nother==1\nneeded==1\ntorch==2.0\n")
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "backend.py").write_text(BACKEND)
    add_wheel(root, "forgather", "1", "Requires-Dist: torch\nRequires-Dist: other\n")
    for index in ("cpu", "ordinary"):
        for name in ("torch", "other", "needed"):
            for version in ("1", "2.0", "3.0"):
                add_wheel(tmp_path / index, name, version, "Requires-Dist: needed\n" if name == "torch" else "")
    return root


def install(checkout: Path, words: str, cpu: str, ordinary: str) -> tuple[dict[str, str], str]:
    """Packages with version and index, and what was printed."""
    names = ("PIP_CONFIG_FILE", "PIP_INDEX_URL", "TORCH_CPU_INDEX", "PIP_TIMEOUT", "PIP_NO_CACHE_DIR")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    env = {**clean, **dict(zip(names, (os.devnull, ordinary, cpu, "1", "1"), strict=True))}
    shell = f'set -euo pipefail; . scripts/environment; environment "" {words}; echo "${{python%/bin/python}}"'
    done = subprocess.run(["bash", "-c", shell], cwd=checkout, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [packages] = Path(done.stdout.split("\n")[-2]).glob("lib/*/site-packages")
    found = {}
    for name in ("torch", "other", "needed"):
        [about] = packages.glob(f"{name}-*.dist-info")
        version = about.name.removeprefix(f"{name}-").removesuffix(".dist-info")
        found[name] = f"{version} {(packages / f'{name}_from.txt').read_text()}"
    return found, done.stdout


@pytest.mark.full
def test_torch_alone_comes_from_its_index_and_versions_are_the_constraints(checkout: Path) -> None:
    with served(checkout.parent / "cpu") as (cpu, asked), served(checkout.parent / "ordinary") as (ordinary, _):
        found, _ = install(checkout, "--cpu", cpu, ordinary)
        assert found == {"torch": "2.0 cpu", "other": "1 ordinary", "needed": "1 ordinary"}
        assert {path.split("/")[1] for path in asked} == {"torch"}
        before = len(asked)
        assert install(checkout, "--cpu", cpu, ordinary)[1].count("\n") == 1  # nothing has changed: nothing is asked
        assert len(asked) == before
        found, _ = install(checkout, "--torch 3.0", cpu, ordinary)
        assert found == {"torch": "3.0 ordinary", "other": "1 ordinary", "needed": "1 ordinary"}
        found, _ = install(checkout, "--newest", cpu, ordinary)
        assert found == {"torch": "2.0 ordinary", "other": "3.0 ordinary", "needed": "3.0 ordinary"}
        assert {path.name for path in checkout.glob(".venv*")} == {".venv", ".venv-torch-3.0", ".venv-newest"}


@pytest.mark.full
def test_an_index_that_does_not_answer_is_waited_for_once(checkout: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, served(checkout.parent / "ordinary") as (ordinary, _):
        cpu = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        found, printed = install(checkout, "--cpu", cpu, ordinary)
        assert found == {"torch": "2.0 ordinary", "other": "1 ordinary", "needed": "1 ordinary"}
        assert [line for line in printed.splitlines() if cpu in line] == [
            f"{cpu} gave no torch 2.0; the ordinary package index is taken (a larger download)"
        ]
