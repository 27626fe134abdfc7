"""Which tests ``scripts/test`` runs for a folder, and for what differs from main, and in how many processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "pick_tests.py"
TREE = {
    "forgather_cli/data/order.py": "",
    "forgather_cli/shards.py": "",
    "conf/data/text.yaml": "",
    "scripts/crash": "",
    "tests/data/test_order.py": "",
    "tests/config/test_recipes.py": "",
    "tests/cli/test_cli.py": "def test() -> None:\n    from forgather_cli.data import order\n",
    "tests/tiny.py": "import forgather_cli.shards",
    "tests/parity.py": "from tiny import train",
    "tests/loss/test_loss.py": "import parity",
    "tests/test_crash.py": 'SCRIPT = "scripts/crash"',
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts/pick_tests.py").write_bytes(SCRIPT.read_bytes())
    for words in ("init -qb main", "add .", "-c user.name=n -c user.email=e commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    return tmp_path


def picked(tree: Path, *words: str) -> list[str]:
    command = [sys.executable, "scripts/pick_tests.py", *words]
    return subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout.split()


def test_a_folder_is_that_of_its_tests(tree: Path) -> None:
    words = ("data", "forgather_cli/data/order.py", "tests/tiny.py", "-k", "data", "--full")
    assert picked(tree, *words) == ["tests/data", "tests/data", *words[2:]]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("forgather_cli/data/order.py", ["cli/test_cli", "data/test_order"]),
        ("forgather_cli/shards.py", ["loss/test_loss"]),
        ("conf/data/text.yaml", ["config/test_recipes"]),
        ("scripts/crash", ["test_crash"]),
        ("tests/tiny.py", ["loss/test_loss"]),
        ("tests/data/test_new.py", ["data/test_new"]),
    ],
)
def test_changed_picks_the_tests_that_have_to_do_with_it(tree: Path, changed: str, tests: list[str]) -> None:
    (tree / changed).write_text("# changed\n" + TREE.get(changed, ""))
    assert picked(tree, "--changed") == [f"tests/{name}.py" for name in tests]


def test_what_changes_nothing_is_said(tree: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        picked(tree, "--changed")
    assert "nothing that tests import differs" in failed.value.stderr


def test_the_suite_runs_in_a_process_more_than_cores_and_in_as_many_as_memory_allows(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def processes(cores: int, gib: int) -> int:
        with monkeypatch.context() as machine:
            machine.setattr(os, "sched_getaffinity", lambda _: range(cores))
            machine.setattr(Path, "read_text", lambda _: f"MemAvailable: {gib << 20} kB")
            number: int = pytestconfig.hook.pytest_xdist_auto_num_workers(config=pytestconfig)
        return number

    assert [processes(2, 24), processes(8, 64), processes(8, 15), processes(1, 1)] == [3, 9, 7, 1]
