"""``forgather cache``: what is listed and pruned, and that nothing in use is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from program import document, forgather, printed, refusal, shown

from forgather_cli.data.cache import Cache, Meta

USER = """
import sys
from forgather_cli.data.cache import Cache
cache = Cache(sys.argv[1])
cache.build_once("tokens", "b", None)
print("uses it", flush=True)
input()
"""
BUILDER = """
import sys
from forgather_cli.data.cache import Cache
def write(directory):
    (directory / "half").write_bytes(bytes(100))
    print("uses it", flush=True)
    input()
Cache(sys.argv[1]).build_once("tokens", "d", write, resumable=True)
"""


def write(directory: Path) -> Meta:
    (directory / "train.bin").write_bytes(bytes(2000))
    return {"train": {"tokens": 1000}, "origin": {"files": "notes/*.md"}}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Three tokenized corpora, used today, 10 and 40 days ago, by a process that has ended; and a file of the user's.

    Not just now: a file system may tell times by the second.
    """
    root = tmp_path / "cache"
    child = os.fork()
    if child == 0:
        for key in "abc":
            Cache(root).build_once("tokens", key, write)
        Cache(root).remember_once("content", "a", lambda: {"content": "0"})
        os._exit(0)
    os.waitpid(child, 0)
    for name, days in {"tokens-a": 0.01, "content-a": 0.01, "tokens-b": 10, "tokens-c": 40}.items():
        used = time.time() - days * 86400.0
        os.utime(root / f"locks/{name}.use", (used, used))
    (root / "tokens.txt").write_text("mine")
    return root


def documents(capsys: pytest.CaptureFixture[str], command: str, root: Path, *words: str) -> list[dict[str, Any]]:
    return document(capsys, "cache", command, "--cache-dir", str(root), *words)


def names(found: list[dict[str, Any]]) -> set[str]:
    return {f"{each['kind']}/{Path(each['path']).name}" for each in found}


def test_entries_are_listed_with_size_and_last_use(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = documents(capsys, "list", cache)
    assert names(found) == {"tokens/a", "tokens/b", "tokens/c", "content/a.json"}
    assert [Path(each["path"]).name for each in found][-2:] == ["b", "c"]  # the last used first
    assert found[-1]["size_bytes"] > 2000
    assert found[-1]["origin"] == {"files": "notes/*.md"}
    assert "notes/*.md" in shown(capsys, "cache", "list", "--cache-dir", str(cache))
    Cache(cache).build_once("tokens", "c", write)
    assert Path(documents(capsys, "list", cache)[0]["path"]).name == "c"
    assert documents(capsys, "list", cache / "nowhere") == []


def test_a_packing_is_listed_by_what_it_packs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("A note.\n" * 200)
    words = [f"data.files=[{tmp_path}/notes.txt]", f"data.cache_dir={tmp_path}", "seq_len=16", "packing=best_fit"]
    assert forgather("data", "build", "data=text", "model=nano", *words) == 0
    packing = next(each for each in documents(capsys, "list", tmp_path) if each["kind"] == "packings")
    assert packing["origin"] == {"packing": "best_fit", "seq_len": 16}
    assert "packing best_fit seq_len 16" in printed(capsys, "cache", "list", "--cache-dir", str(tmp_path)).out


def test_what_was_not_used_for_long_is_pruned(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("cache", "prune", "--cache-dir", str(cache)) == 2
    assert forgather("cache", "prune", "--cache-dir", str(cache), "--all", "--older-than", "1d") == 2
    assert "got '1y'" in refusal(capsys, "cache", "prune", "--cache-dir", str(cache), "--older-than", "1y")
    assert forgather("cache", "prune", "--cache-dir", str(cache), "--older-than", "30d") == 2  # nobody can be asked
    assert len(documents(capsys, "list", cache)) == 4
    assert names(documents(capsys, "prune", cache, "--older-than", "30d", "--yes")) == {"tokens/c"}
    assert names(documents(capsys, "prune", cache, "--older-than", "30d")) == set()  # nothing to ask about
    assert not (cache / "tokens/c").exists()
    assert names(documents(capsys, "prune", cache, "--all", "--yes")) == {"tokens/a", "tokens/b", "content/a.json"}
    assert (cache / "tokens.txt").exists()
    directory, _ = Cache(cache).build_once("tokens", "c", write)  # and is made again
    assert (directory / "train.bin").exists()


@pytest.mark.parametrize(("code", "entry"), [(USER, "tokens/b"), (BUILDER, "tokens/.tmp-d")])
def test_what_a_process_uses_or_builds_stays(
    code: str, entry: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", code, str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "uses it\n"
        assert names([each for each in documents(capsys, "list", cache) if each["in_use"]]) == {entry}
        assert entry not in names(documents(capsys, "prune", cache, "--all", "--yes"))
        assert (cache / entry).is_dir()
        process.kill()
    assert names(documents(capsys, "prune", cache, "--all", "--yes")) == {entry}
    assert not (cache / entry).exists()
