"""A directory that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from forgather_cli.checkpoint.files import new_directory
from forgather_cli.errors import ModelError, SetupError

pytestmark = pytest.mark.usefixtures("own_directory")


def names() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def test_it_has_no_name_until_it_is_whole() -> None:
    with new_directory(Path("a/b/out")) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text("x")
        assert not Path("a/b/out").exists()
    assert names() == ["a", "a/b", "a/b/out", "a/b/out/sub", "a/b/out/sub/file"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_leave_nothing(number: signal.Signals) -> None:
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)]

    def make() -> None:
        with new_directory(Path("a/out")) as directory:
            (directory / "file").write_text("x")
            signal.raise_signal(number)
        raise AssertionError("went on")

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        make()
    assert names() == []
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)] == before


def test_what_a_killed_process_leaves_goes_with_the_next_one_for_the_same_target() -> None:
    Path(".tmp-other-77.0").mkdir()
    child = os.fork()
    if child == 0:
        with new_directory(Path("out")) as directory:
            (directory / "file").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(names()) == 3
    with new_directory(Path("out")) as living:
        assert names() == [".tmp-other-77.0", living.name]
        with new_directory(Path("out")) as faster:
            assert names() == sorted([".tmp-other-77.0", living.name, faster.name])
        os.rmdir("out")
    assert names() == [".tmp-other-77.0", "out"]


def test_errors_leave_nothing() -> None:
    with (
        pytest.raises(SetupError, match=r"out: cannot be written \(No space left on device: file\); nothing was left"),
        new_directory(Path("out")),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/file")
    with pytest.raises(ModelError, match="as it was raised"), new_directory(Path("out")):
        raise ModelError("as it was raised")
    assert names() == []


def test_what_is_there_is_not_replaced() -> None:
    Path("there").mkdir()
    Path("link").symlink_to("nowhere")
    for name in ("there", "link"):
        with pytest.raises(SetupError, match=f"{name}: exists already"), new_directory(Path(name)):
            raise AssertionError("began")
    with pytest.raises(SetupError, match="late: exists already"), new_directory(Path("late")):
        Path("late").mkdir()  # somebody else was faster
    assert names() == ["late", "link", "there"]


def test_room_and_permission_are_asked_for_first() -> None:
    with pytest.raises(SetupError, match=r"out: needs .* GB, and .* GB are free"), new_directory(Path("out"), 1 << 60):
        raise AssertionError("began")
    Path("file").write_text("x")
    with pytest.raises(SetupError, match="is no directory that you may write to"), new_directory(Path("file/out")):
        raise AssertionError("began")
    assert names() == ["file"]
