"""Runs of several ranks: who starts them, where their output goes, how they are stopped, and joining others' ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from program import Process, forgather, until
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from two_ranks import RUN, SMALL, WATCHED, ended, fault, free_port, nobody_left, recorded_steps, start

from forgather_cli.config.decode import load_saved
from forgather_cli.config.load import load_config
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.launch.agent import exit_code
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.exit_status import ExitStatus, Kind, caused_by, done, first_cause, killed
from forgather_cli.launch.job import Job
from forgather_cli.launch.layout import gpus, plan_layout
from forgather_cli.launch.place import Place, first_host, joined, launched
from forgather_cli.launch.processes import children, is_running, keep, temporary_folder
from forgather_cli.launch.rank import wait_for_start
from forgather_cli.launch.rendezvous import Rendezvous
from forgather_cli.run_dir import RunDir

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
            "MASTER_PORT": "99", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4",
         "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
         "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1"}  # fmt: skip


@pytest.fixture(autouse=True)
def _joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *SLURM]:
        monkeypatch.delenv(name, raising=False)


# ------------------------------------------------------------------------------------------------- the place of a rank


def test_torchrun_says_where_a_rank_stands() -> None:
    assert joined([], {}) is None
    assert joined([], TORCHRUN) == Place(1, 4, 1, 2, "a", 99, agent_store=True, by="torchrun")
    host = joined([], {**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not host.agent_store


def test_ranks_of_ours_are_numbered_by_node_rank_whatever_the_rendezvous_made_of_it() -> None:
    environ = dict(TORCHRUN)
    assert launched(1, 0, environ).rank == 3
    assert launched(0, 0, environ).rank == 1
    assert environ["GROUP_RANK"] == "0"


def test_an_environment_that_is_not_whole_is_said() -> None:
    for change, message in (
        ({"WORLD_SIZE": None}, "WORLD_SIZE: missing in the environment, which has RANK"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: missing"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: must be a whole number in the environment, got 'two'"),
    ):
        environ = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
        with pytest.raises(ConfigError, match=message):
            joined([], environ)


def test_slurm_says_where_a_rank_stands_and_which_host_is_the_first() -> None:
    assert joined([], SLURM) == Place(3, 4, 1, 2, "gpu03", 20007, by="Slurm")
    assert joined(["x=1", "rdzv_endpoint=head:5000"], SLURM) == Place(3, 4, 1, 2, "head", 5000, by="Slurm")
    named = joined([], {**SLURM, "MASTER_ADDR": "m", "MASTER_PORT": "1", "SLURM_PROCID": "0"})
    assert named == Place(0, 4, 1, 2, "m", 1, by="Slurm")
    one_gpu = joined([], {**SLURM, "CUDA_VISIBLE_DEVICES": "1"})
    assert one_gpu.local_rank == 0  # --gpus-per-task: each task sees its own as the first
    assert joined([], {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}) is None  # a batch script
    assert joined([], {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    nodes = {"n1": "n1", "n1,n2": "n1", "n[3-5]": "n3", "a[07,9]-ib,b": "a07-ib", "": ""}
    assert {each: first_host(each) for each in nodes} == nodes


# ---------------------------------------------------------------------------------------------------------- how many


def layout_of(*words: str, place: Place | None = None) -> str:
    loaded = load_config("default", [*SMALL, *words])
    return plan_layout(loaded.config, loaded.given, place).describe()


def test_who_trains() -> None:
    assert layout_of() == "this process alone"
    assert layout_of("trainer=ddp", "nproc_per_node=1") == "this process alone"
    assert layout_of("trainer=ddp", "nproc_per_node=1", "max_restarts=2") == (
        "1 ranks, started by torchrun, restarted up to 2 times"
    )
    assert layout_of("trainer=ddp") == "2 ranks, started by torchrun"  # on a CPU
    assert layout_of("trainer=ddp", "nnodes=2", "nproc_per_node=2", "node_rank=1", "rdzv_endpoint=a:1") == (
        "2 ranks on each of 2 nodes, this being node 1, started by torchrun"
    )
    two_nodes = ["trainer=ddp", "nnodes=2", "nproc_per_node=2"]  # which meet by what has started them
    assert layout_of(*two_nodes, place=Place(size=4, by="Slurm")) == "4 ranks that Slurm has started"


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in (("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-1f,GPU-2e", 2), ("3", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(gpus()) == count
    words = [word for word in SMALL if not word.startswith("device")]
    with pytest.raises(ConfigError, match="pipeline needs at least 2 ranks, got 1"):  # found as late as this
        plan_layout(load_config("default", [*words, "trainer=pipeline"]).config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    loaded = load_config("default", [*words, "trainer=ddp", "global_batch_size=null"])
    assert plan_layout(loaded.config).world == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plan_layout(loaded.config).world == 2


@pytest.mark.parametrize(
    ("words", "joined_size", "message"),
    [
        (["rdzv_endpoint=here"], None, r"rdzv_endpoint: must be HOST:PORT, got 'here'"),
        (["nproc_per_node=2", "device=cuda:1"], None, "device: cuda:1 is one device for 2 ranks; set device=cuda"),
        (["node_rank=1"], None, "node_rank: counts from 0 to nnodes-1, got 1 with nnodes=1"),
        (["nnodes=2"], None, "rdzv_endpoint: nnodes=2 have to meet somewhere; set rdzv_endpoint=HOST:PORT"),
        (["trainer=single"], 2, "single trains in one process, but torchrun has started 2; choose trainer=ddp"),
        (["trainer=pipeline"], 1, r"trainer: pipeline needs at least 2 ranks, got 1 .*; choose trainer=single"),
        (["nproc_per_node=2"], 4, "nproc_per_node: 2 on 1 nodes are asked for, but torchrun"),
        (["max_restarts=2"], 2, "max_restarts: the ranks were started by torchrun.*; leave it out"),
        ([], 3, "global_batch_size: 4 sequences cannot be shared evenly by 3 ranks"),
    ],
)
def test_settings_that_a_launch_or_a_joined_world_does_not_allow(
    words: list[str], joined_size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of("trainer=ddp", *words, place=joined_size and Place(size=joined_size, by="torchrun"))


# ------------------------------------------------------------------------------------------------- what ranks tell


def status(kind: str, rank: int, at: float) -> ExitStatus:
    return ExitStatus(rank, kind, 1, kind, time=at)


def test_the_first_cause_is_the_earliest_that_needs_no_explanation() -> None:
    raised = status(Kind.ERROR, 2, 5.0)
    later = [status(Kind.MISTAKE, 1, 6.0), caused_by(3, raised)]
    assert first_cause([status(Kind.LOST, 0, 1.0), raised, *later]) == raised
    assert first_cause([status(Kind.LOST, 0, 1.0), caused_by(3, raised)]) == raised  # of another node, known by hearsay
    assert first_cause([status(Kind.WAITED, 0, 1.0), status(Kind.STUCK, 1, 2.0)]) == status(Kind.STUCK, 1, 2.0)
    assert first_cause([done(0), done(1)]) is None


def test_a_killed_rank_explains_errors_at_the_same_moment_and_none_before() -> None:
    for rest, first in ((status(Kind.ERROR, 0, 9.7), Kind.KILLED), (status(Kind.ERROR, 0, 8.0), Kind.ERROR)):
        assert first_cause([rest, killed(1, -signal.SIGKILL, "log", 10.0)]).kind == first


def test_temporary_folders_of_killed_commands_go_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = os.fork()
    if child == 0:
        with Job.create(node=0, nodes=1), temporary_folder("eval"), temporary_folder("kept") as kept:
            keep(kept)  # for people to look at
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    left = sorted(tmp_path.iterdir())
    assert len(left) == 3
    with Job.create(node=0, nodes=1) as first, temporary_folder("eval") as second:
        assert sorted(tmp_path.iterdir()) == sorted([first.root, second, left[-1]])
        assert stat.S_IMODE(second.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == [left[-1]]


def test_how_a_rank_ended_is_known_when_torchrun_s_agent_has_waited_for_it() -> None:
    handler = SubprocessHandler("sleep", ("60",), {}, None, None, 0, None)
    handler.proc.kill()
    handler.proc.wait()
    assert exit_code(handler.proc.pid) == -signal.SIGKILL
    assert exit_code(1) is None


def test_what_is_worth_a_restart() -> None:
    assert ExitStatus(0, Kind.ERROR, 1).worth_a_restart
    assert caused_by(1, ExitStatus(0, Kind.KILLED, 1)).worth_a_restart
    given_up = [ExitStatus(0, Kind.MISTAKE, 2), ExitStatus(0, Kind.UNHEEDED, 1), ExitStatus(0, Kind.CUT, 143)]
    for final in (*given_up, done(0), ExitStatus(0, "stopped", 75)):
        assert not final.worth_a_restart
        assert not caused_by(1, final).worth_a_restart


def test_a_job_folder_carries_words_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job.create(node=1, nodes=2) as job:
        for name, value in job.environment(2).items():
            monkeypatch.setenv(name, value)
        rank = Job.from_environment()
        assert rank == replace(job, number=2)
        assert (job.stop_signal(), job.attempts()) == (None, 0)
        job.request_stop(signal.SIGINT)
        assert rank.stop_signal() == signal.SIGINT
        attempt = rank.attempt(0)
        attempt.write_pid(2)
        attempt.write_status(caused_by(2, status(Kind.LOST, 3, 1.0)))
        attempt.write_status(status(Kind.ERROR, 2, 2.0))  # what it knows itself counts more
        attempt.write_status(status(Kind.LOST, 2, 3.0))
        assert job.attempts() == 1
        assert job.attempt(0).pids() == {2: os.getpid()}
        assert job.attempt(0).statuses() == [status(Kind.ERROR, 2, 2.0)]
    assert not job.root.exists()


def connected() -> list[Rendezvous]:
    port = free_port()
    return [Rendezvous(Place(rank, 2, rank, 2, "localhost", port)) for rank in range(2)]


def a_run(root: Path) -> RunDir:
    """What ranks may be told to train."""
    root.mkdir()
    run = RunDir(root)
    run.config.write_text("seed: 1")
    return run


@pytest.mark.parametrize("of_one_node", [True, False])
def test_ranks_meet_and_hear_of_each_other(of_one_node: bool, tmp_path: Path) -> None:
    folders = [Rendezvous(Place(rank, 2, rank, 2), tmp_path / "folder") for rank in range(2)] if of_one_node else None
    first, second = folders or connected()
    assert second.failure() is None
    assert second.shared() == (None, "")
    if not of_one_node:
        first.share(a_run(RUN.root), going_on=True)
        until(lambda: second.shared()[0])  # torch's store does not wait until a message has come
        shared, _ = second.shared()
        assert (Path(shared.root), shared.config, shared.going_on) == (RUN.root.resolve(), "config.yaml", True)
        assert stat.S_IMODE(RUN.secret.stat().st_mode) == 0o600
    for rendezvous in (first, second):
        rendezvous.all_here()
    second.store.set("where", "1 now")
    until(lambda: first.store.get("where") == "1 now")
    assert first.store.add("hang", "0")
    until(lambda: second.store.get("hang") == "0")
    assert not second.store.add("hang", "1")
    assert first.dead_neighbour() is None
    lost, raised = status(Kind.LOST, 0, 1.0), status(Kind.ERROR, 1, 2.0)
    assert first.fail(lost)
    assert second.fail(raised)  # explains the other, although it comes later
    assert not first.fail(status(Kind.ERROR, 0, 3.0))
    assert first.failure() == raised
    leaving = threading.Thread(target=first.leave)
    leaving.start()  # waits for the other, if the store is in its process
    leaving.join(120 if of_one_node else 0.3)
    assert leaving.is_alive() is not of_one_node
    second.leave()
    leaving.join(10)
    assert not leaving.is_alive()


def test_a_stranger_in_the_store_is_not_listened_to() -> None:
    first, second = connected()
    store = PrefixStore("forgather/0", TCPStore("localhost", first._place.port, is_master=False))
    theirs = a_run(Path("theirs"))
    shared = {"root": str(theirs.root.resolve()), "config": "config.yaml", "sha256": "", "going_on": False}
    for secret in (None, "guessed"):
        if secret is not None:
            theirs.secret.write_text(secret)
            theirs.secret.chmod(0o600)
        store.set("shared", "-" * 64 + json.dumps(shared))
        found, problem = second.shared()
        assert found is None
        assert "output_dir" in problem
    first.share(a_run(RUN.root), going_on=False)
    assert second.shared()[0] is not None
    for rendezvous in (first, second):
        rendezvous.all_here()
    for unsigned in ("", "-" * 64, "0" * 64):
        store.set("where", unsigned + "1 now")
        store.set("failed/cause", unsigned + status(Kind.ERROR, 1, 2.0).to_json())
        assert second.store.get("where") is second.failure() is None
    first.store.set("own/0", "1 now")
    store.set("where", store.get("own/0"))  # signed, as something else
    assert second.store.get("where") is None
    assert first.fail(status(Kind.ERROR, 0, 3.0))
    assert second.failure() == status(Kind.ERROR, 0, 3.0)
    first.leave(patience=0.0)


def test_a_run_directory_that_another_node_does_not_see_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forgather_cli.launch.rank._SEES_DIRECTORY", 0.1)
    first, second = connected()
    run = a_run(RUN.root)
    first.share(run, going_on=False)
    other = RankContext(Place(1, 2), rendezvous=second)
    assert wait_for_start(other).run.root == RUN.root.resolve()
    secret = run.secret.read_text()
    differs = "output_dir: .*run of rank 0 is not what .* sees there; set output_dir to a"
    for change, said in (
        (lambda: run.config.write_text("seed: 2"), differs),
        (lambda: run.secret.write_text("other"), differs),
        (lambda: run.secret.chmod(0o644), "output_dir: .*mode 644.*; set it to .*FORGATHER_LAUNCH_SECRET"),
        (run.secret.unlink, differs),
    ):
        change()
        with pytest.raises(SetupError, match=said):
            wait_for_start(other)
    monkeypatch.setenv("FORGATHER_LAUNCH_SECRET", secret)
    run.config.write_text("seed: 1")
    assert wait_for_start(other).run.root == RUN.root.resolve()


# ------------------------------------------------------------------------------------------------------- a run of ours


def test_a_run_on_two_ranks_from_start_to_stop_and_on() -> None:
    with start("max_steps=100000", "save_strategy=no", *WATCHED) as job:
        job.read_until("step 3/")
        job.process.send_signal(signal.SIGUSR2)
        until(lambda: "Current thread" in RUN.rank_log(1).read_text())
        for pid in (job.process.pid, *(int(Path(f"pid-{rank}").read_text()) for rank in range(2))):
            os.kill(pid, signal.SIGTERM)  # as Slurm and systemd do: to all of them, and it is one signal
        assert job.finish() == 75, job.output
    # rank 0 may hear of it from the other one before its own signal comes
    told = re.findall("SIGTERM(?: in another rank)?: saving after this step; a second signal", job.output)
    assert len(told) == 1, job.output
    assert job.lines[-1] == "forgather resume run"
    assert (ended().code, ended().reason) == (75, "stopped by SIGTERM")
    assert RUN.checkpoint_steps() == [ended().step]
    assert recorded_steps() == list(range(1, ended().step + 1))
    ours = re.compile(
        r"^\d{4}-|^rank 0 begins$|^SIGTERM|^\s*$|^  [a-z]|^run |^newest |^stopped by SIGTERM; to resume|"
        r"^forgather resume"
    )
    assert [line for line in job.lines if not ours.match(line)] == []  # no other rank, and no library, speaks there
    logs = [RUN.rank_log(rank).read_text() for rank in range(2)]
    assert ["rank 0 begins" in log for log in logs] == [True, False]
    assert ["rank 1 begins" in log for log in logs] == [False, True]
    assert all("Current thread" in log for log in logs)
    assert nobody_left()
    assert forgather("resume", "run", f"max_steps={ended().step + 2}", "trainer=single") == 0
    assert load_saved(RUN.later_config(1)).resume_from_checkpoint is True
    assert recorded_steps() == list(range(1, ended().step + 1))


def test_a_signal_before_ranks_have_begun_ends_them_with_the_launcher() -> None:
    with start("max_steps=10", cold=True) as job:
        until(lambda: len(children(job.process.pid)) >= 2, 0.005)
        ranks = children(job.process.pid)
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 143, job.output
    assert job.lines[-2:] == ["", "ended at once by SIGTERM before the first step; there is no checkpoint"]
    assert ended().code == 143
    assert [pid for pid in ranks if is_running(pid)] == []


# ------------------------------------------------------------------------------------------------- a world of others


RAISED = "error: rank 1: callback fault failed in on_step_begin: ZeroDivisionError"


def torchrun(options: str, *words: str) -> Process:
    return Process(*options.split(), "-m", "forgather_cli", *words, module="torch.distributed.run")


def test_ranks_that_torchrun_has_started_join_and_its_restarts_go_on() -> None:
    words = [*SMALL[:-1], "save_steps=4", "async_save=false", *fault("step-raise", after=6)]
    with torchrun("--nproc-per-node=2 --max-restarts=1", "train", *words, "trainer=ddp", "max_steps=8") as job:
        assert job.finish() == 0, job.output
    assert job.output.count("training from step 0") == 1
    assert job.output.count(RAISED) == 1
    [root] = Path("outputs/default").iterdir()
    run = RunDir(root)
    assert recorded_steps(run) == list(range(1, 9))
    assert "resumed from" in run.rank_log(0).read_text()
    assert run.later_starts() == [1]


def test_torchrun_on_two_hosts_trains_one_run() -> None:
    where = f"--nnodes=2 --nproc-per-node=1 --master-addr=localhost --master-port={free_port()}"
    words = ["train", *SMALL, "trainer=ddp", "nnodes=2", "max_steps=3"]
    with torchrun(f"{where} --node-rank=1", *words) as second, torchrun(f"{where} --node-rank=0", *words) as first:
        assert [first.finish(), second.finish()] == [0, 0], first.output + second.output
    assert recorded_steps() == [1, 2, 3]
    assert "training from step 0 of 3" in first.output
    assert "training" not in second.output
    assert RUN.rank_log(1).exists()


def test_one_rank_trains_in_this_process_whatever_its_strategy_and_whoever_has_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert forgather("train", *SMALL, "trainer=ddp", "nproc_per_node=1", "max_steps=2") == 0
    assert recorded_steps() == [1, 2]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert forgather("train", *SMALL, "max_steps=1", "overwrite_output_dir=true") == 0
    assert recorded_steps() == [1]


@contextmanager
def slurm(*words: str) -> Iterator[list[Process]]:
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_ADDR": "localhost",
              "MASTER_PORT": str(free_port())}  # fmt: skip
    tasks = [{**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    with ExitStack() as stack:
        yield [stack.enter_context(Process("train", *SMALL, *words, env=task)) for task in tasks]


def test_a_failure_among_joined_ranks_is_told_by_the_rank_that_failed_and_ends_all() -> None:
    with slurm("trainer=ddp", "max_steps=100000", *fault("step-raise")) as ranks:
        assert [rank.finish() for rank in ranks] == [1, 1], ranks[0].output
    assert "ZeroDivisionError" not in ranks[0].output
    assert ranks[1].output.count(RAISED) == 1
    assert "ended, since callback fault failed" in RUN.rank_log(0).read_text()
    assert "ZeroDivisionError" in ended().reason


def test_a_mistake_in_a_joined_world_is_said_once_and_ends_all() -> None:
    with slurm("trainer=ddp", "max_stepz=1") as ranks:
        assert [rank.finish() for rank in ranks] == [2, 2], ranks[0].output
    assert ranks[0].output.startswith("error: max_stepz: unknown setting")
    assert ranks[1].output == ""
    assert not RUN.root.exists()


# ------------------------------------------------------------------------------------------------------- several nodes


@contextmanager
def two_nodes(*words: str, other: Path | None = None, port: int | None = None) -> Iterator[list[Process]]:
    """Two launchers on this machine; ``other`` is the second's working directory."""
    place = ["trainer=ddp", "nnodes=2", "nproc_per_node=1", f"rdzv_endpoint=localhost:{port or free_port()}"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(Process("train", *SMALL, *place, f"node_rank={node}", *words, cwd=cwd))
            for node, cwd in ((1, other), (0, None))
        ][::-1]


def test_two_nodes_train_one_run_whoever_writes_into_their_store(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    port = free_port()
    with two_nodes("max_steps=100000", "save_strategy=no", other=elsewhere, port=port) as nodes:
        nodes[0].read_until("step 3/")
        stranger = TCPStore("localhost", port, is_master=False)
        assert not stranger.check(["torch.rendezvous.forgather"])  # which torch would unpickle
        assert b"model" not in stranger.get("forgather/0/shared")
        failure = status(Kind.ERROR, 1, time.time()).to_json()
        for signature in ("", "-" * 64):
            stranger.set("forgather/0/failed/cause", signature + failure)
        time.sleep(2.5)  # two looks at the store
        nodes[0].process.send_signal(signal.SIGTERM)
        assert [node.finish() for node in nodes] == [75, 75], "\n".join(node.output for node in nodes)
    assert recorded_steps() == list(range(1, ended().step + 1))
    assert (nodes[1].output, ended().reason) == ("", "stopped by SIGTERM")
    assert RUN.rank_log(1).exists()
    assert not RUN.secret.exists()
    assert list(elsewhere.iterdir()) == []


def test_two_nodes_start_again_together() -> None:
    words = ["max_steps=6", "save_steps=2", "async_save=false", "max_restarts=1", *fault("step-kill", after=3)]
    with two_nodes(*words) as nodes:
        assert [node.finish() for node in nodes] == [0, 0], "\n".join(node.output for node in nodes)
    assert sorted(set(recorded_steps())) == [1, 2, 3, 4, 5, 6]
    assert "resumed from" in RUN.rank_log(0).read_text()


def test_a_failure_on_one_node_is_told_on_both() -> None:
    with two_nodes("max_steps=100000", *fault("step-raise")) as nodes:
        assert [node.finish() for node in nodes] == [1, 1], "\n".join(node.output for node in nodes)
    assert [node.output.count(RAISED) for node in nodes] == [1, 1]
    assert nobody_left()
    assert "ZeroDivisionError" in ended().reason
