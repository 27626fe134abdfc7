"""Kill a DiLoCo server and its workers at random instants, resume them, and compare the weights that come out.

    scripts/diloco_campaign 200                       # 200 trials, seeds 0 to 199
    scripts/diloco_campaign 1 --seed 17
    scripts/diloco_campaign 60 --lying                # beside a third member that holds the token and lies
    scripts/diloco_campaign 20 --lying --mode async   # or plain, fragments
    scripts/diloco_campaign 40 --honest               # nobody lies, and nobody may be rejected
    scripts/diloco_campaign --influence               # how far liars take a model: diloco_influence.py
    scripts/diloco_campaign 3 --lying --mode plain --control  # nobody is bounded: trials with a liar who plays fail

A trial draws two workers' layouts, a compression, and whether whole weights are exchanged or fragments beside training,
and kills the server, a worker (its launcher, or one of its ranks)
or several of them with SIGKILL, one to four times, at instants spread over the run; what was killed is started again at
once. The global weights after the last round, and what each worker has trained, must be those of an undisturbed run of
the same layouts, bit for bit. With ``--lying`` the undisturbed run has a third member too, which sends NaN in each
round, or no third member where the liar's registrations are refused. With ``--mode`` half of the liars, in async
mode all, send changes too that count, tiny, growing and huge ones; then the weights are nobody's, but all that the
honest send must count, and in sync mode nothing of the liar's may weigh more than ``max_share`` allows (``--control``:
null). ``--honest`` is in ``diloco_honest.py``. Exit code 1 if a trial fails; its runs are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from crash_job import patience
from diloco_liar import Liar
from safetensors.torch import load_file

from forgather_cli.diloco.ledger import read_ledger
from forgather_cli.diloco.wire import VERSION_HEADER, WIRE_VERSION

ROUNDS, SYNC_EVERY = 3, 3
ROUNDS_OF_LIARS = 5  # the liar is given up after three
MODES = ("plain", "async", "fragments")
TOKEN, CONTROL = "a-token-of-this-campaign", "the-control-token-of-it"
LAYOUTS = {
    "single": ["trainer=single"],
    "ddp2": ["trainer=ddp", "nproc_per_node=2"],
    "fsdp2x2": ["trainer=fsdp2", "nproc_per_node=2"],
    "pipeline2": ["trainer=pipeline", "nproc_per_node=2", "n_microbatches=2"],
}
PAIRS = (("single", "fsdp2x2"), ("ddp2", "pipeline2"), ("fsdp2x2", "ddp2"), ("pipeline2", "single"))
COMPRESSIONS = ("fp32", "bf16", "int8", "int4")
STREAMING = ["diloco.num_fragments=2", f"diloco.sync_every={2 * SYNC_EVERY}", "diloco.overlap=2"]
RECIPE = [
    "model=nano", "precision=fp32", "optimizer=adamw", "learning_rate=2e-3", "warmup_steps=2", "data=synthetic",
    "data.seq_len=16",
    "data.num_samples=256", "data.num_eval_samples=8", "callbacks=minimal", "global_batch_size=8",
    "deterministic=true", "device=cpu", "eval_strategy=no", "save_steps=2",
]  # fmt: skip
_LIMIT = 300.0  # seconds for a whole trial


Launch = Callable[[list[str], dict[str, str], Path], Any]
"""Words of forgather, environment, file for output -> what is used of the ``Popen`` of their process."""


def cold(words: list[str], environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    """As a user starts it."""
    command = [sys.executable, "-m", "forgather_cli", *words]
    with output.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


@dataclass
class Member:
    """A server or worker, and the process that it is now."""

    name: str
    run: Path
    words: list[str]
    environment: dict[str, str]
    launch: Launch = cold
    process: Any = None
    starts: int = 0

    def start(self) -> None:
        """A new run, or one that goes on."""
        begun = (self.run / "config.yaml").exists()
        words = ["resume", str(self.run)] if begun and self.name == "server" else self.words
        if begun and self.name != "server":
            words = [*words, "resume_from_checkpoint=true"]
        self.process = self.launch(words, self.environment, self.run.parent / f"{self.name}.txt")
        self.starts += 1

    def kill(self, rng: random.Random) -> str:
        """SIGKILL for the process, or for one of its ranks; returns which."""
        is_one = self.name == "server" or "trainer=single" in self.words  # what else it has started is no rank
        pids = [self.process.pid, *([] if is_one else _children(self.process.pid))]
        pid = rng.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if pid == self.process.pid:
            self.process.wait(patience(_LIMIT))
        else:  # the launcher sees that a rank is gone, ends the others and itself
            self.process.wait(patience(60))
        return f"{self.name} ({'itself' if pid == self.process.pid else 'a rank'})"


def free_port(seed: int) -> int:
    """Below those that the kernel gives to outgoing connections: one of them may take it while the server is away."""
    for port in range(20000 + 10 * seed % 10000, 30000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no port is free")


def _children(pid: int) -> list[int]:
    """Of all its threads: a launcher starts its ranks in threads."""
    found: list[int] = []
    for task in Path("/proc").glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


@dataclass
class Trial:
    seed: int
    layouts: tuple[str, str]
    compression: str
    streams: bool = False
    """Fragments are exchanged while training goes on."""
    kills: list[tuple[float, str]] = field(default_factory=list)
    """(share of the undisturbed run's time, whom)."""
    liar: str = ""
    """Of --lying: it "lies" and is rejected, "plays" with what may count, or only "knocks" and is refused; in the
    undisturbed run "void".
    """
    is_async: bool = False
    done: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        what = "; ".join(self.problems) or ", ".join(self.done) or "nothing was hit"
        return f"seed {self.seed}: {self.kind}: {'FAILED: ' if self.problems else ''}{what}"

    @property
    def kind(self) -> str:
        how = "streaming" if self.streams else "async" if self.is_async else ""
        return "-".join(filter(None, [*self.layouts, self.compression, how, self.liar]))


def draw(seed: int, pairs: Sequence[tuple[str, str]], lying: bool = False, mode: str = "") -> Trial:
    rng = random.Random(seed)
    trial = Trial(seed, rng.choice(pairs), rng.choice(COMPRESSIONS), rng.random() < 0.5)
    for _ in range(rng.randint(1, 4)):
        trial.kills.append((rng.uniform(0.02, 1.0), rng.choice(("server", "a", "b"))))
    trial.kills.sort()
    if lying:
        trial.liar = rng.choice(("lies", "lies", "knocks"))
    if mode:
        trial.streams, trial.is_async = mode == "fragments", mode == "async"
        trial.liar = "plays" if trial.is_async else rng.choice(("lies", "plays"))
    return trial


class Campaign:
    """Trials under ``work``, with the undisturbed runs that they are compared with."""

    def __init__(
        self,
        work: Path,
        pairs: Sequence[tuple[str, str]] = PAIRS,
        *,
        lying: bool = False,
        mode: str = "",
        control: bool = False,
        launch: Launch = cold,
        seconds: float = 20.0,
    ) -> None:
        """``seconds``: over which kills are spread where there is no undisturbed run to compare with."""
        self._work, self._pairs, self._lying, self._mode, self._launch = work, pairs, lying, mode, launch
        self._seconds = seconds
        self._more = ["diloco.max_share=null"] if control else []

    def trial(self, seed: int) -> Trial:
        trial = draw(seed, self._pairs, self._lying, self._mode)
        root = self._work / f"trial-{seed}"
        try:
            if trial.liar == "plays":
                shutil.rmtree(root, ignore_errors=True)
                self._run(trial, root, self._seconds)
                trial.problems += thrown_out(root / "server", allowed={"c"}) + _heavy(root / "server")
                if not trial.problems:
                    shutil.rmtree(root)
                return trial
            calm = Trial(seed, trial.layouts, trial.compression, trial.streams)
            calm.liar = "void" if trial.liar == "lies" else ""
            reference = self._work / f"reference-{calm.kind}"
            if not (reference / "seconds").exists():
                shutil.rmtree(reference, ignore_errors=True)
                began = time.monotonic()
                self._run(calm, reference, 0.0)
                (reference / "seconds").write_text(str(time.monotonic() - began))
            shutil.rmtree(root, ignore_errors=True)
            self._run(trial, root, float((reference / "seconds").read_text()))
            trial.problems += _differences(root, reference)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            trial.problems.append(f"{type(error).__name__}: {error}; see {root}")
        if not trial.problems:
            shutil.rmtree(root)
        return trial

    def _run(self, trial: Trial, root: Path, seconds: float) -> None:
        """Start all, kill as the trial says, start again what was killed, and wait for the end."""
        port, rounds = free_port(trial.seed), ROUNDS_OF_LIARS if self._lying else ROUNDS
        recipe = [*RECIPE, f"max_steps={rounds * SYNC_EVERY}"]
        ours = [
            f"diloco.workers={3 if trial.liar in ('lies', 'plays', 'void') else 2}", f"diloco.sync_every={SYNC_EVERY}",
            "diloco.mode=async" if trial.is_async else f"diloco.max_rounds={rounds}",
            f"diloco.compression={trial.compression}", "diloco.eviction=null", "diloco.save_every=2",
            *(STREAMING if trial.streams else []), *self._more,
        ]  # fmt: skip
        workers = {name: [*recipe, *LAYOUTS[layout]] for name, layout in zip(("a", "b"), trial.layouts, strict=True)}
        members = team(root, port, [*recipe, *ours], workers, self._launch)
        liar = Liar(port, TOKEN, root / "server", trial.seed, trial.liar) if trial.liar else None
        with ended(members.values()), liar or contextlib.nullcontext():
            began = time.monotonic()
            for member in members.values():
                member.start()
            rng = random.Random(trial.seed)
            for share, whom in trial.kills:
                time.sleep(max(0.0, began + share * seconds - time.monotonic()))
                member = members[whom]
                if member.process.poll() is None:
                    trial.done.append(f"{member.kill(rng)} at {share:.2f}")
                    member.start()
            while any(member.process.poll() is None for member in members.values()):
                if trial.is_async and all(members[name].process.poll() is not None for name in workers):
                    stop(port, "stop_now")
                if liar is not None and liar.is_broken:
                    raise RuntimeError(liar.problems[-1])
                if time.monotonic() - began > patience(seconds + _LIMIT):
                    left = [name for name, member in members.items() if member.process.poll() is None]
                    raise RuntimeError(f"{', '.join(left)} did not come to an end")
                time.sleep(0.1)
            if liar is not None:
                counted = [f"round {round}: {what} of the liar counts" for round, what in liar.counted.items()]
                trial.problems += liar.problems + counted
                trial.done.append("lies: " + ", ".join(f"{what} {n}" for what, n in sorted(liar.told.items())))
            codes = {name: member.process.poll() for name, member in members.items()}
            # a worker that was killed after its last round finds no server any more: it waits, and ends to be resumed
            last = {name: 75 if members[name].starts > 1 else 0 for name in ("a", "b")}
            if codes["server"] or any(codes[name] not in (0, allowed) for name, allowed in last.items()):
                raise RuntimeError(f"exit codes {codes}")


def team(root: Path, port: int, server: list[str], workers: dict[str, list[str]], launch: Launch) -> dict[str, Member]:
    """A server and workers with these settings, by name, under ``root``, which is new; none is started."""
    root.mkdir(parents=True)
    (root / "token").write_text(TOKEN)
    (root / "token").chmod(0o600)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(root.parent / "cache")}
    environment["DILOCO_CONTROL_TOKEN"] = CONTROL
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
    words = {
        "server": ["diloco", "server", "default", *server, f"diloco.port={port}", f"diloco.token_file={root}/token"],
        **{
            name: ["diloco", "worker", "default", *own, "callbacks.diloco.heartbeat_interval=1",
                   "callbacks.diloco.timeout=20", "callbacks.diloco.max_sync_retries=1",
                   f"callbacks.diloco.token_file={root}/token", f"callbacks.diloco.worker_id={name}",
                   "--server", f"127.0.0.1:{port}"]
            for name, own in workers.items()
        },
    }  # fmt: skip
    return {
        name: Member(name, root / name, [*own, f"output_dir={root}/{name}"], environment, launch)
        for name, own in words.items()
    }


def stop(port: int, command: str) -> None:
    """Tell the server to ``stop`` at the end of its round, or to ``stop_now``, if it is there."""
    headers = {"Authorization": f"Bearer {CONTROL}", VERSION_HEADER: str(WIRE_VERSION)}
    with contextlib.suppress(OSError):
        urlopen(
            Request(f"http://127.0.0.1:{port}/control", json.dumps({"command": command}).encode(), headers), timeout=5
        ).close()


def thrown_out(server: Path, allowed: Collection[str] = ()) -> list[str]:
    """What the ledger says of others than ``allowed`` whose work did not count."""
    found = []
    for closed in (line.closed for line in read_ledger(server / "rounds.jsonl")):
        if closed is not None:
            told = [*closed.rejected, *((who, "missing") for who in closed.missing)]
            found += [f"{who} does not count: {why}" for who, why in told if who not in allowed]
    return found


def _heavy(server: Path) -> list[str]:
    """Rounds in which the liar has more influence than twice the median of three members."""
    found = []
    for closed in (line.closed for line in read_ledger(server / "rounds.jsonl")):
        products = {sent.worker: weight * sent.norms[0] for sent, weight in closed.submissions} if closed else {}
        if len(products) == 3 and products.get("c", 0.0) > 2.001 * sorted(products.values())[1]:
            found.append(f"the liar weighs {products['c']:.3g} beside {products}")
    return found


@contextlib.contextmanager
def ended(members: Iterator[Member]) -> Iterator[None]:
    kept = list(members)
    try:
        yield
    finally:
        for member in kept:
            if member.process is not None and member.process.poll() is None:
                for pid in (member.process.pid, *_children(member.process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                member.process.wait()


def _differences(root: Path, reference: Path) -> list[str]:
    """Where global weights, or those of a worker's last checkpoint, differ from the undisturbed run's."""
    problems = []
    for name in ("server", "a", "b"):
        files = [
            max((side / name / "checkpoints").glob("step-*")) / "model" / "model.safetensors"
            for side in (root, reference)
        ]
        found, wanted = map(load_file, files)
        differing = [tensor for tensor in wanted if not found[tensor].equal(wanted[tensor])]
        if files[0].parent.parent.name != files[1].parent.parent.name:
            problems.append(f"{name}: ends with {files[0].parent.parent.name}, not {files[1].parent.parent.name}")
        elif differing:
            problems.append(
                f"{name}: {len(differing)} of {len(wanted)} tensors differ, {differing[0]} first; see {root}"
            )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if sys.argv[1:2] == ["--influence"]:
        import diloco_influence

        return diloco_influence.main(sys.argv[2:])
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--layouts", nargs=2, choices=LAYOUTS, help="of the workers, default: drawn")
    parser.add_argument("--lying", action="store_true", help="a third member holds the token, and lies")
    parser.add_argument("--honest", action="store_true", help="nobody lies, nobody is killed, and nobody is rejected")
    parser.add_argument("--mode", choices=MODES, default="", help="of the exchanges, default: drawn")
    parser.add_argument("--control", action="store_true", help="by a rule that is wrong: trials must fail")
    parser.add_argument("--work", type=Path, help="directory for runs; default: a temporary one, kept if a trial fails")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="diloco-campaign-"))
    pairs, failed = [tuple(arguments.layouts)] if arguments.layouts else PAIRS, 0
    campaign: Any
    if arguments.honest:
        from diloco_honest import HonestCampaign

        campaign = HonestCampaign(work, mode=arguments.mode)
    else:
        options = {"lying": arguments.lying, "mode": arguments.mode, "control": arguments.control}
        campaign = Campaign(work, pairs, **options)
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        trial = campaign.trial(seed)
        failed += bool(trial.problems)
        print(trial, flush=True)
    print(f"{arguments.trials} trials, {failed} failed" + (f"; see {work}" if failed else ""))
    if not failed and arguments.work is None:
        shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
