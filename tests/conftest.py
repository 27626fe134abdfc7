"""``--full``: also the cases marked ``full``, which are many and alike; without it they are deselected.

Jobs of the tests register, and caches and temporary files lie, in a folder of the session's, not among the user's.
Processes that tests start import what lies in ``tests/`` itself, as the tests do.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import composed
import forks
import pytest

from forgather_cli.launch.processes import available_cores, available_memory, collect_less
from forgather_cli.terminal import bars


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every case of the parity suite, not a selection (hours)")


def pytest_configure(config: pytest.Config) -> None:
    collect_less()
    bars.SILENCE = 3600.0  # what a busy machine makes slow prints nothing that a test does not expect
    bars.Bar.__init__.__kwdefaults__["after"] = 3600.0
    # a shell's background job ignores SIGINT, and so would every process that a test starts and interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    home = tempfile.mkdtemp(prefix="forgather-tests-")
    # after multiprocessing has removed its own folder there (its priority is -100), and by no process that is forked
    Finalize(None, shutil.rmtree, (home, True), exitpriority=-101)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path outlives the session, as ever
    for name in ("XDG_CONFIG_HOME", "TMPDIR", "XDG_CACHE_HOME"):
        if name != "XDG_CACHE_HOME" or not hasattr(config, "workerinput"):  # xdist's processes share what is cached
            os.environ[name] = str(Path(home) / name.lower())
            Path(os.environ[name]).mkdir()
    tempfile.tempdir = None  # read anew
    if hasattr(config, "workerinput"):
        forks.be_served()
    else:
        os.environ["FORGATHER_TESTS_COMPOSED"] = f"{home}/composed"
        os.environ["FORGATHER_TESTS_PLAIN"] = f"{home}/plain"  # the socket of plain.py
        importable = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, importable))
        if config.getoption("numprocesses", None):
            forks.serve_workers()
    composed.share()
    config.addinivalue_line("markers", "full: a case that only --full runs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes for ``-n auto``: one more than cores, since tests also wait, but one at most for each 2 GiB that are
    free, of which it takes 1.5 with the ranks that it starts.
    """
    return max(1, min(available_cores() + 1, available_memory() >> 31))


_LONGEST = (
    "strategies/test_parity", "checkpoint/test_crash", "test_docs", "launch/test_faults", "strategies/test_fsdp2",
    "launch/test_launch_ranks", "strategies/test_pipeline", "trainer/test_trainer_ranks", "launch/test_launch_signals",
    "cli/test_end_to_end", "cli/test_cli", "launch/test_hang", "callbacks/test_callbacks_strategies", "launch",
    "finalize", "cli", "strategies", "control", "trainer", "precision", "plan", "config", "checkpoint",
    "test_rooms", "test_gpu_check", "test_wheel", "callbacks",
)  # fmt: skip
"""Files and folders whose tests take long: they come first, lest one process of xdist ends long after the others. Those
that wait, for signals and timeouts, stand between others that compute."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


def _turn(item: pytest.Item) -> int:
    file = item.path.as_posix()  # a table of refusals has its location in refusals.py
    return next((turn for turn, name in enumerate(_LONGEST) if f"tests/{name}" in file), len(_LONGEST))


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_looked_for_among_new_objects() -> None:
    gc.collect()
    forks.freeze()


@pytest.fixture(autouse=True)
def _event_files_are_read_in_order() -> None:
    """Those that a test writes one after another in one second. TensorBoard (2.21) reads files in the order of their
    names, which end with the process's count of them, not padded: ``.10`` comes before ``.9``, and would purge nothing.
    """
    if writer := sys.modules.get("tensorboard.summary.writer.event_file_writer"):  # else it counts from 0
        writer._global_uid._value = max(writer._global_uid._value, 10**6)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes in one thread; its switches are afterwards as they were."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The working directory is an empty one."""
    monkeypatch.chdir(tmp_path)
