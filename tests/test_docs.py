"""README.md and docs/: links lead somewhere, what is named exists, and every block that can be run is run.

A page is a session: its blocks run from the top in one directory (``docs_shell.Shell``), which has a small run in
``outputs/quickstart``. ``bash``: as it stands. ``console``: the lines behind ``$``; what else is there was printed.
``python``: a script; ``yaml`` and ``python`` that begin with ``# path/of.yaml`` are put there. A comment before a block
says how it ends (``<!-- exit code: 2 -->``), that it needs a package (``<!-- needs: wandb -->``), that only ``--full``
runs it (``<!-- full: why -->``) or that nothing can (``<!-- not run: why -->``); ``pytest -rs`` lists these.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import notebook
import pytest
import typer
from docs_shell import ROOT, SERVE_PORT, Shell

from forgather_cli import __version__
from forgather_cli.cli.app import app
from forgather_cli.config.options import GROUPS
from forgather_cli.config.paths import settings
from forgather_cli.trainer.hugging_face import ARGUMENTS

RUN = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_readme_is_short_and_links_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 180
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(text)}
    assert not {*ROOT.glob("docs/*.md")} - linked


def test_the_version_is_that_of_the_changelog() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert newest is not None
    assert __version__.partition(".dev")[0] == newest[1]


def test_the_table_of_hugging_faces_arguments_is_that_of_the_code() -> None:
    updated = runpy.run_path(str(ROOT / "scripts/python_api_table.py"))["updated"]
    page = (ROOT / "docs/python_api.md").read_text(encoding="utf-8")
    assert updated(page) == page, "run scripts/python_api_table.py"


@dataclass(frozen=True)
class Block:
    """A fenced block, and what the comment before it says: ``not run``, ``full``, ``needs`` or ``exit code``."""

    page: Path
    line: int
    language: str
    text: str
    note: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """Where a reader is told to put it."""
        found = re.match(r"# ([\w./-]+\.(?:ya?ml|py))$", self.text.partition("\n")[0])
        return found[1] if found and self.language in ("python", "yaml") else None

    @property
    def script(self) -> str:
        """The commands, for bash."""
        if self.language != "console":
            return self.text
        return "\n".join(re.findall(r"^\$ (.+(?<!\\)(?:\\\n.+)*)$", self.text, flags=re.M))


BLOCK = re.compile(r"(?:^<!-- ([a-z ]+): ([^\n]+) -->\n+)?^```(\w*)\n(.*?)^```$", flags=re.M | re.S)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start(3)].count("\n") + 1, found[3], found[4], found[1] or "", found[2] or "")
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in RUN for block in blocks_of(page)]
OF_OTHER_LANGUAGES = ("text", "json")  # what commands print, and files that are shown


def is_run(block: Block) -> bool:
    return block.language not in OF_OTHER_LANGUAGES and block.note != "not run"


def is_left_out(block: Block) -> bool:
    return block.note == "not run" or (block.note == "needs" and importlib.util.find_spec(block.reason) is None)


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_says_what_it_is(page: Path) -> None:
    """No block escapes: none without a known language, none by indentation, no note that nothing reads."""
    wrong = [
        str(b)
        for b in blocks_of(page)
        if b.language not in ("bash", "console", "python", "yaml", *OF_OTHER_LANGUAGES)
        or b.note not in ("", "not run", "full", "needs", "exit code")
        or (b.language == "yaml" and not b.file and b.note != "not run")
        or (b.language == "text" and re.search(r"^(\$|forgather|python) ", b.text, flags=re.M))
    ]
    rest = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    wrong += re.findall(r"\n\n(    .*)", rest)
    assert not wrong


@pytest.mark.parametrize("block", [each for each in BLOCKS if is_left_out(each)], ids=str)
def test_blocks_that_are_not_run_say_why(block: Block) -> None:
    assert block.note == "needs" or block.reason.startswith(("needs ", "takes "))
    pytest.skip(f"{block.note}: {block.reason}")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        directory = tmp_path_factory.mktemp("start")
        shell = Shell(directory)
        code, output = shell.run("scripts/quickstart")
        shell.close()
        assert code == 0, output
        yield directory


FIRST = ("README.md", "docs/walk.md", "docs/finetune.md")
"""Pages whose blocks are run at every change; those of the others, which take minutes together, before a release."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[] if name in FIRST else pytest.mark.full)
        for page in RUN
        if any(map(is_run, blocks_of(page)))
        for name in [str(page.relative_to(ROOT))]
    ],
)
def test_blocks_run(page: Path, started: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shell = Shell(tmp_path, started)
    request.addfinalizer(shell.close)
    for block in filter(is_run, blocks_of(page)):
        if is_left_out(block) or (block.note == "full" and not request.config.getoption("--full")):
            continue
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text.partition("\n")[2])
            continue
        script = block.script.replace("127.0.0.1:8080/", f"127.0.0.1:{SERVE_PORT}/")
        if block.language == "python":
            (tmp_path / "block.py").write_text(script)
            script = "python block.py"
        code, output = shell.run(script)
        assert code == int(block.reason if block.note == "exit code" else 0), f"{block}\n{output}"


def test_the_notebook_shows_one_output_and_no_lines(
    own_directory: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = notebook.Kernel(monkeypatch)
    Path("page.md").write_text("A page of some words, again and again.\n" * 200)
    cells = json.loads((ROOT / "docs/examples/notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    [texts] = kernel.outputs.values()
    assert "run's mean loss" in texts[-1]
    assert " loss " not in capsys.readouterr().out
    assert names["trainer"].state.global_step == 20


def code_of(page: Path) -> list[str]:
    """Code between backticks, and the lines of blocks, commands that go on over several lines joined."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for block in blocks_of(page) if not block.text.startswith("#!")]  # a script's names are its own
    lines = [line for block in blocks for line in block.text.replace("\\\n", " ").splitlines()]
    return [*lines, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))]


@pytest.mark.parametrize("page", [*RUN, ROOT / "recipes/README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_named_exists(page: Path) -> None:
    code = code_of(page)
    theirs = {block.file for block in BLOCKS}
    paths = {
        path.rstrip(".")
        for line in code
        for path in re.findall(r"(?<![\w/.])(?:conf|docs|tests|scripts|forgather_cli|recipes)/[\w./*-]+", line)
    }
    wrong = [path for path in paths if not any(ROOT.glob(path)) and path not in theirs and "/mine." not in path]
    known = {part for setting in settings().values() for part in (setting.path, setting.leaf)}
    known |= {*ARGUMENTS, "key", "group"}
    for line in code:
        for found in re.finditer(r"(?:^|\s)forgather ([a-z_]+)(?: ([a-z_]+))?([^`#|]*)", line):
            wrong += unknown_of_command(found[1], found[2] or "", found[3])
        span = re.fullmatch(r"[+~]*([a-z_]+(?:\.[a-z_]+)*)=[^=(]+", line)
        if span and span[1] not in known and span[1].partition(".")[0] not in GROUPS:
            wrong.append(line)
    assert not wrong


def test_what_contributing_names_exists() -> None:
    """Files by the end of their path; classes, functions and attributes as words of the code."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sources = [path for part in ("forgather_cli", "scripts", "tests") for path in (ROOT / part).rglob("*.py")]
    files = set(re.findall(r"[\w/]+\.py\b", page)) - {"settings.py"}  # of whoever adds an option
    assert not [file for file in files if not any(f"{path}".endswith(f"/{file}") for path in sources)]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    names = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", page)) - files
    assert not {name for name in names if not words.issuperset(name.split("."))}


def unknown_of_command(first: str, second: str, rest: str) -> list[str]:
    """Commands and options that the program does not have."""
    command: Any = typer.main.get_command(app)
    for word in filter(None, (first, second)):
        if hasattr(command, "commands") and (command := command.get_command(None, word)) is None:
            return [f"forgather {first} {second}"]
    options = {option for param in command.params for option in param.opts} | {"--help"}
    words = [word.partition("=")[0] for word in rest.split() if word.startswith("--")]
    return [f"forgather {first} {second} {word}" for word in words if word.replace("_", "-") not in options]
