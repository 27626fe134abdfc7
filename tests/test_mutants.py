"""scripts/mutants: what is drawn, what is killed and what is left, in a tree with one module."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MODULES
from places import draw, mutants_of, read

ROOT = Path(__file__).parents[1]
ORDER = "data/order.py"
RUN = (
    "import sys; from pathlib import Path; import mutants\n"
    f"sys.exit(mutants.main(sys.argv[1:], Path.cwd(), {{{ORDER!r}: ('data/test_order.py',)}}, ['pytest', 'numpy']))"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("forgather_cli/__init__.py", f"forgather_cli/{ORDER}", "tests/data/test_order.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts/mutation").mkdir(parents=True)
    return tmp_path


def start(tree: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts/mutation")}
    command = [sys.executable, "-c", RUN, "--n", "100", "--out", "found.jsonl"]
    return subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.mark.full
def test_a_mutant_is_killed_or_left_a_killed_campaign_goes_on_and_what_it_prints_can_be_listed(tree: Path) -> None:
    module = tree / "forgather_cli" / ORDER
    module.write_text("def order(length):\n    return list(range(length - 0))\n\n\ndef unused(i):\n    return i + i\n")
    (tree / "tests/data/test_order.py").write_text(
        "from forgather_cli.data.order import order\n\n\ndef test_order():\n    assert order(3) == [0, 1, 2]\n"
    )
    source, results = module.read_bytes(), tree / "found.jsonl"
    drawn = mutants_of(ORDER, source)
    left = [mutant for mutant in drawn if mutant.within == "unused" or "length + 0" in mutant.after]
    first = start(tree)
    while not (line := first.stdout.readline()).startswith("killed"):
        assert line
    first.kill()
    first.communicate()
    done = results.read_text()
    results.write_text(done + '{"tests": "data/te')  # it was killed while it wrote

    code, output = finished(start(tree))
    assert code == 1
    assert results.read_text().startswith(done)
    found = {each["mutant"]: each["killed_by"] for each in map(json.loads, results.read_text().splitlines())}
    assert found == {"": ""} | {
        mutant.key: "" if mutant in left else "data/test_order.py::test_order" for mutant in drawn
    }
    assert module.read_bytes() == source

    entries = output[output.index("[[equal]]") :].replace('why = ""', 'why = "nothing calls it"')
    gone = "data/order.py:unused:return i * i -> pass"
    (tree / "scripts/mutation/equal.toml").write_text(f'{entries}\n[[equal]]\nkey = "{gone}"\nwhy = "nothing does"\n')
    _, output = finished(start(tree))
    assert [line for line in output.splitlines() if line.startswith("stale") and line.endswith(gone)]
    total = next(line.split() for line in output.splitlines() if line.startswith("all "))
    assert total == ["all", *map(str, (len(drawn), len(drawn) - len(left), 0, len(left)))]
    assert "more than 5% are said to be equal" in output


def test_the_modules_and_their_tests_are_there() -> None:
    for module, stages in MODULES.items():
        assert (ROOT / "forgather_cli" / module).is_file()
        for path, _, name in (test.partition("::") for tests in stages for test in tests.split()):
            assert (ROOT / "tests" / path).exists()
            assert not name or re.search(rf"^(def|class) {name}\b", (ROOT / "tests" / path).read_text(), re.M)


def test_a_seed_draws_the_same_whatever_else_the_module_has(tree: Path) -> None:
    package = tree / "forgather_cli"
    drawn = [mutant.key for mutant in draw(read(package, [ORDER]), 7, 30)]
    assert drawn == [mutant.key for mutant in draw(read(package, [ORDER]), 7, 40)][:30]
    assert drawn != [mutant.key for mutant in draw(read(package, [ORDER]), 8, 30)]
    module = package / ORDER
    module.write_text(module.read_text().replace("class Order:", "# a comment\n\n\nclass Order:"))
    assert drawn == [mutant.key for mutant in draw(read(package, [ORDER]), 7, 30)]


def test_operators_bounds_signs_and_statements_are_changed_and_no_texts() -> None:
    source = (
        b'"""1 + 1"""\nX: tuple[int, 1 + 1] = -2\n\n\ndef f(a):\n    """2 < 3"""\n    log.info(1 + 1)\n'
        b"    if not a and ((a)  # 1 < 2\n    <= 1):\n        raise E(f'{a + 1}', 1)\n    return a[b:]\n"
    )
    changes = {(mutant.line, mutant.after) for mutant in mutants_of("x.py", source)}
    assert changes == {
        (2, "X: tuple[int, 1 + 1] = 2"), (2, "X: tuple[int, 1 + 1] = -3"), (2, "X: tuple[int, 1 + 1] = -1"),
        (8, "if a and ((a)  # 1 < 2"), (8, "if not a or ((a)  # 1 < 2"), (9, "< 1):"), (9, "<= 2):"), (9, "<= 0):"),
        (10, "pass"), (11, "pass"), (11, "return a[(b) + 1:]"), (11, "return a[(b) - 1:]"),
    }  # fmt: skip
