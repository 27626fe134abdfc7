"""The wheel carries conf/ and recipes/ and trains outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import tiny

from forgather_cli import __version__

ROOT = Path(__file__).parents[1]


def succeed(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    succeed([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)])
    [path] = out.glob("*.whl")
    return path


def test_the_wheel_has_every_option_and_recipe_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.yaml")}
        assert files
        assert {f"forgather_cli/{file}" for file in files} <= names
    assert "forgather_cli/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"forgather_cli", f"forgather-{__version__}.dist-info"}


@pytest.mark.full
def test_the_installed_wheel_trains_outside_the_checkout(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment that has, without downloading them again, the packages that it depends on.

    They are put on the path by a .pth file, whose own .pth files (the editable checkout) are not read.
    """
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = f"-m pip --python {python} install --no-deps --no-index --ignore-installed {wheel}"
    succeed([sys.executable, *install.split()])
    monkeypatch.delenv("PYTHONPATH")
    where = "import forgather_cli; print(forgather_cli.__file__)"
    assert succeed([str(python), "-c", where], cwd=tmp_path).startswith(str(home))
    (tmp_path / "corpus.txt").write_text("To be or not to be, that is the question. " * 400)
    words = ["train", "data=text", "data.files=[corpus.txt]", "cache_dir=cache", "model=nano", "seq_len=32",
             "max_steps=2", "global_batch_size=4", "warmup_steps=1", "logging_steps=1", "output_dir=run"]  # fmt: skip
    succeed([str(python.with_name("forgather")), *words], cwd=tmp_path)
    explained = succeed([str(python.with_name("forgather")), "config", "explain", "warmup_steps"], cwd=tmp_path)
    assert "optimizer steps of linear warmup" in explained  # a comment of the source
    assert {record["step"] for record in tiny.metrics(tmp_path / "run") if "loss" in record} == {1, 2}
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "model" / "model.safetensors").is_file()
