"""Words for pytest from those of scripts/test: a folder of tests, or of the package, and ``--changed``.

    data, forgather_cli/data, forgather_cli/data/order.py     tests/data
    --changed       tests of what differs from the branch main where this one left it; on main itself, of what is not
                    committed: tests that import a module that differs, themselves or by a module of tests/, those of
                    that module's folder, those that name a script or document that differs, and those that differ
                    themselves. conf/ and recipes/ have the tests of config/.

Prints one word per line; everything else is left as it is.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

_WITH_VALUE = ("-k", "-m", "-n", "-p", "-o", "-c", "-W")  # options of pytest whose value is the next word


def picked(word: str, root: Path) -> list[str]:
    """The paths that ``word`` stands for."""
    if word == "--changed":
        found = changed_tests(root)
        if not found:
            raise SystemExit("--changed: nothing that tests import differs from main")
        return found
    part = Path(word).parts[1:] if word.startswith("forgather_cli/") else Path(word).parts
    return [f"tests/{part[0]}"] if part and (root / "tests" / part[0]).is_dir() else [word]


def changed_tests(root: Path) -> list[str]:
    """Files of tests, below ``root``, that have to do with what differs from main."""
    files = _changed_files(root)
    modules = {_module(file) for file in files if file.startswith("forgather_cli/") and file.endswith(".py")}
    folders = {Path(file).parts[1] for file in files if file.startswith("forgather_cli/")}
    if any(file.startswith(("conf/", "recipes/")) for file in files):
        folders.add("config")
    named = [file for file in files if not file.startswith(("forgather_cli/", "conf/", "recipes/", "tests/"))]

    tests = {file.relative_to(root).as_posix(): file.read_text() for file in (root / "tests").rglob("*.py")}
    imports = {file: _imports(text) for file, text in tests.items()}
    changed = {file for file in tests if file in files}
    while True:  # what imports a module of tests/ that changed, or that imports what did
        helpers = {Path(file).stem for file in changed if not Path(file).name.startswith("test_")}
        more = {file for file, found in imports.items() if found & (modules | helpers)} - changed
        if not more:
            break
        changed |= more
    changed |= {file for file in tests if Path(file).parts[1] in folders}
    changed |= {file for file, text in tests.items() if any(name in text for name in named)}
    return sorted(file for file in changed if Path(file).name.startswith("test_"))


def _changed_files(root: Path) -> set[str]:
    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.split()

    try:
        [base] = git("merge-base", "HEAD", "main")
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"--changed: there is no branch main to compare with ({error.stderr.strip()})") from error
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(text: str) -> set[str]:
    """Names of what a file imports anywhere in it; of ``from a import b`` both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


if __name__ == "__main__":
    ROOT, words = Path(__file__).parents[1], sys.argv[1:]
    for before, word in zip(["", *words], words, strict=False):
        print(*([word] if before in _WITH_VALUE else picked(word, ROOT)), sep="\n")
