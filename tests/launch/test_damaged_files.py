"""What a resume reads back besides its checkpoint: empty, cut anywhere in its last record, with foreign lines, CRLF."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny
from program import Process, forgather, printed

from forgather_cli.callbacks.json_logger import RecordFile
from forgather_cli.callbacks.textgen import cut_samples
from forgather_cli.checkpoint.compare import changed_files, record_files
from forgather_cli.checkpoint.rollbacks import Rollback, append_rollback, read_rollbacks
from forgather_cli.config.decode import dump_saved, load_saved, load_tree
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco.ledger import Submission, read_ledger, write_line
from forgather_cli.diloco.rounds import Rounds
from forgather_cli.diloco.serve import token_of
from forgather_cli.diloco.submissions import Submissions
from forgather_cli.documents.regular_files import read_state
from forgather_cli.errors import CheckpointError, ConfigError, CutOffError, SetupError
from forgather_cli.launch.exit_status import read_exit_record, write_exit_record
from forgather_cli.run_dir import RunDir

FOREIGN = [b"foreign line\n", b'{"a": 1}\n', b"null\n", b"[1]\n", b"\n", b"\xff\xfe\0\n"]
"""Lines that no file of ours has."""


def cuts(content: bytes, last: int) -> Iterator[bytes]:
    """A file that ends within its last record, which begins at ``last``: at each byte of it."""
    return (content[:end] for end in range(last, len(content)))


def crlf(content: bytes) -> bytes:
    return content.replace(b"\n", b"\r\n")


def is_aside(path: Path, content: bytes, said: str) -> bool:
    """Whether a file lies beside its place as it was, and ``said`` names it."""
    aside = path.with_name(f"{path.name}.bak")
    return aside.read_bytes() == content and f"{path}:" in said and f"set aside as {aside.name}" in said


def nothing_is_aside(folder: Path) -> bool:
    return not list(folder.glob("*.bak*"))


# ------------------------------------------------------------------------------------------------------- logs by lines

LOGS = ["metrics.jsonl", "gradient_norms.jsonl", "parameter_norms.jsonl"]


def logged(path: Path) -> bytes:
    file = RecordFile(path)
    for step in (1, 2, 3):
        file.add({"loss": 1 / step}, step=step, epoch=0.5)
    return path.read_bytes()


def steps_after_a_resume(path: Path) -> list[int]:
    """What stands in a log after a resume at step 3, and one more record."""
    file = RecordFile(path)
    file.begin(3)
    file.add({"loss": 0.1}, step=4, epoch=1.0)
    return [record["step"] for record in tiny.metrics(path.parent, path.name)]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_empty_cut_or_of_windows_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    whole = logged(path)
    for torn in cuts(whole, whole[:-1].rindex(b"\n") + 1):
        path.write_bytes(torn)
        assert steps_after_a_resume(path) == [1, 2, 4]
    path.write_bytes(b"")
    assert steps_after_a_resume(path) == [4]
    path.write_bytes(crlf(whole))
    assert steps_after_a_resume(path) == [1, 2, 3, 4]
    assert nothing_is_aside(tmp_path)


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("name", LOGS)
def test_a_log_with_foreign_lines_is_set_aside(
    name: str, foreign: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    first, *rest = logged(path).splitlines(keepends=True)
    damaged = b"".join([first, foreign, *rest])
    path.write_bytes(damaged)
    assert steps_after_a_resume(path) == [4]
    assert is_aside(path, damaged, caplog.text)


# ------------------------------------------------------------------------------------------------------------- samples

SAMPLES = [
    b"=== step 2 ===\n--- 1 ---\na one\n\ntwo\n\n--- 2 ---\nb three\n\n",
    b"=== step 4 ===\n--- 1 ---\na four\n\n--- 2 ---\nb five\n\n",
]


def test_samples_are_cut_behind_the_last_one_that_is_whole(tmp_path: Path) -> None:
    path, whole = tmp_path / "samples.txt", b"".join(SAMPLES)
    for torn in cuts(whole, len(SAMPLES[0])):
        path.write_bytes(torn)
        cut_samples(path, 4)
        kept = path.read_bytes()
        assert kept in (SAMPLES[0], SAMPLES[0] + SAMPLES[1][: SAMPLES[1].index(b"--- 2")])
        assert (len(kept) > len(SAMPLES[0])) == (b"a four\n\n" in torn)
        path.write_bytes(torn)
        cut_samples(path, 3)
        assert path.read_bytes() == SAMPLES[0]
    for torn in cuts(SAMPLES[0], 0):  # of the first record; and an empty file
        path.write_bytes(torn)
        cut_samples(path, -1)
        assert path.read_bytes() == b""
    for content, left in ((crlf(whole), crlf(SAMPLES[0])), (whole + b"foreign line\n", SAMPLES[0])):
        path.write_bytes(content)
        cut_samples(path, 4)
        assert path.read_bytes() == content.removesuffix(b"foreign line\n")
        cut_samples(path, 3)
        assert path.read_bytes() == left
    assert nothing_is_aside(tmp_path)


@pytest.mark.parametrize("foreign", [*FOREIGN, b"\xef\xbb\xbf", b"=== step x ===\n\n", b"foreign\n\n"])
def test_samples_that_begin_with_foreign_lines_are_set_aside(
    foreign: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, damaged = tmp_path / "samples.txt", foreign + b"".join(SAMPLES)
    path.write_bytes(damaged)
    cut_samples(path, 4)
    assert not path.exists()
    assert is_aside(path, damaged, caplog.text)
    path.write_bytes(foreign[:-1])  # alone, and torn
    cut_samples(path, 4)
    assert not path.exists() or path.read_bytes() == b""


# ----------------------------------------------------------------------------------------------------------- rollbacks


def rollbacks(folder: Path) -> tuple[RunDir, list[Rollback], bytes]:
    run = RunDir(folder)
    found = [
        Rollback(n, "2026-01-01T00:00:00+00:00", "x", 6 * n, 4 * n, 2, [n, n + 1], [{"epoch": 0, "sample": 8 * n}])
        for n in (1, 2)
    ]
    for each in found:
        append_rollback(run, each)
    return run, found, run.rollbacks.read_bytes()


def test_rollbacks_that_are_empty_cut_or_of_windows_are_read(tmp_path: Path) -> None:
    run, (first, second), whole = rollbacks(tmp_path)
    for torn in cuts(whole, whole.index(b"\n") + 1):
        run.rollbacks.write_bytes(torn)
        assert read_rollbacks(run) == read_rollbacks(run, mends=True) == [first]
        append_rollback(run, second)
        assert run.rollbacks.read_bytes() == whole
    run.rollbacks.write_bytes(crlf(whole))
    assert read_rollbacks(run, mends=True) == [first, second]
    run.rollbacks.write_bytes(b"")
    assert read_rollbacks(run, mends=True) == []
    assert nothing_is_aside(tmp_path)


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_rollbacks_with_foreign_lines_the_others_count(
    foreign: bytes, place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, found, whole = rollbacks(tmp_path)
    lines = whole.splitlines(keepends=True)
    damaged = b"".join([*lines[:place], foreign, *lines[place:]])
    run.rollbacks.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"jsonl:{place + 1}: is damaged.* forgather resume ") as refused:
        read_rollbacks(run)
    assert "\n" not in str(refused.value)
    assert run.rollbacks.read_bytes() == damaged, "a look changes nothing"
    assert read_rollbacks(run, mends=True) == read_rollbacks(run) == found
    assert run.rollbacks.read_bytes() == whole
    assert is_aside(run.rollbacks, damaged, caplog.text)


# ------------------------------------------------------------------------------------------------------------- ledgers


def ledger(folder: Path) -> tuple[Path, Rounds, bytes]:
    """Of two rounds."""
    made, path = Rounds(DilocoServerSettings(workers=1), initial="i", model="m"), folder / "rounds.jsonl"
    made.register("a", "a", batch=4, model="m", now=0.0)
    for _ in range(2):
        if (line := made.line) is not None:
            member = line.members[0]
            made.submit(Submission(0, "a", line.round, ("p",), 9, member.ranges, norms=(1.0,)), 0.0)
            assert made.close(0.0, [(7.0, 100)])
        made.append(made.opening("t"), 0.0)
    for line in made.lines:
        write_line(path, line)
    return path, made, path.read_bytes()


def test_a_ledger_that_is_empty_cut_or_of_windows_is_read(tmp_path: Path) -> None:
    path, made, whole = ledger(tmp_path)
    for torn in cuts(whole, whole.index(b"\n") + 1):
        path.write_bytes(torn)
        assert read_ledger(path) == made.lines[:1]
        write_line(path, made.lines[1])
        assert path.read_bytes() == whole
    path.write_bytes(crlf(whole))
    assert read_ledger(path) == made.lines
    path.write_bytes(b"")
    assert read_ledger(path) == []


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_ledger_with_foreign_lines_names_the_line_and_the_command(foreign: bytes, place: int, tmp_path: Path) -> None:
    path, _, whole = ledger(tmp_path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:place], foreign, *lines[place:]]))
    with pytest.raises(SetupError, match=rf"line {place + 1} is no round") as refused:
        read_ledger(path)
    assert "forgather diloco server . output_dir=NEW" in str(refused.value)
    path.write_bytes(lines[1])
    with pytest.raises(SetupError, match=r"line 1 does not follow.* forgather diloco server \. "):
        read_ledger(path)


# --------------------------------------------------------------------------------------------------------- one document


def state(path: Path) -> Any:
    return read_state(path, "then")


def slot(path: Path) -> Any:
    found = Submissions(path.parent, {}, "fp32").sent(1, 2)
    return None if found is None else json.loads(json.dumps(asdict(found)))


SENT = json.loads(json.dumps(asdict(Submission(2, "a", 1, ("p",), 9, ((0, 4),), norms=(1.0,)))))
DOCUMENTS: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "worker.json": (state, {"worker_id": "a", "secret": "s"}),
    "round-00000001-slot-0002.json": (slot, SENT),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_state_that_cannot_be_read_is_set_aside(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, (read, document) = tmp_path / name, DOCUMENTS[name]
    assert read(path) is None
    whole = json.dumps(document).encode() + b"\n"
    for content in (whole, crlf(whole), whole[:-1], whole + b"\n"):
        path.write_bytes(content)
        assert read(path) == document
    assert nothing_is_aside(tmp_path)
    damages = [*cuts(whole[:-1], 0), *(foreign + whole for foreign in FOREIGN if foreign != b"\n"),
               *(whole + foreign for foreign in FOREIGN if foreign != b"\n")]  # fmt: skip
    for damaged in damages:
        path.write_bytes(damaged)
        caplog.clear()
        assert read(path) is None
        assert is_aside(path, damaged, caplog.text)
        path.with_name(f"{name}.bak").unlink()


def test_what_a_run_has_noted_of_its_files_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, files = RunDir(tmp_path), {"a.txt": "1", "b.txt": "2"}
    record_files(run, "f", files)
    whole = run.data_files.read_bytes()
    for damaged in [*cuts(whole, 0), *(foreign + whole for foreign in FOREIGN if foreign != b"\n")]:
        run.data_files.write_bytes(damaged)
        caplog.clear()
        assert changed_files(run, "f", files, "2026-01-01T00:00:00+00:00") == "", "it is not known"
        record_files(run, "f", files)
        assert run.data_files.read_bytes() == whole
        aside = tmp_path / "data_files.json.bak"
        assert is_aside(run.data_files, damaged, caplog.text)
        aside.unlink()
    run.data_files.write_bytes(crlf(whole + b"\n"))
    assert changed_files(run, "f", {"a.txt": "1", "b.txt": "3"}, "") == "b.txt (changed)"


def test_an_outcome_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_exit_record(run, "done", 0, "done", 4)
    whole, record = run.exit.read_bytes(), read_exit_record(run)
    assert record is not None
    run.exit.write_bytes(crlf(whole))
    assert read_exit_record(run) == record
    for damaged in [*cuts(whole[:-1], 0), *(foreign + whole for foreign in FOREIGN if foreign != b"\n")]:
        run.exit.write_bytes(damaged)
        assert read_exit_record(run) is None


def test_a_config_that_ends_early_counts_for_none(tmp_path: Path) -> None:
    """Not for one with the defaults of what it lacks."""
    path, tree = tmp_path / "config.yaml", load_config("default", []).tree
    path.write_text(dump_saved(tree))
    whole, config = path.read_bytes(), load_saved(path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(crlf(whole))
    assert load_saved(path) == config
    command = "forgather resume . makes it again from the newest checkpoint"
    for content in (b"".join(lines[:count]) for count in range(len(lines))):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=command):
            load_tree(path)
    for torn in cuts(whole[:-1], whole.rindex(b"adapter:")):
        path.write_bytes(torn)
        with pytest.raises(ConfigError, match=str(path)):
            load_saved(path)
    path.write_bytes(b"")
    with pytest.raises(CutOffError, match=command):
        load_tree(path)
    path.write_bytes(b"".join([*lines[:3], b"foreign line\n", *lines[3:]]))
    with pytest.raises(ConfigError, match=command):
        load_tree(path)


@pytest.mark.parametrize("content", [b"", b"overrides: [a", *FOREIGN, b"a: 1\nforeign line\n"])
def test_of_an_origin_that_cannot_be_read_nothing_is_known(content: bytes, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.origin.write_bytes(content)
    assert (run.first_directory(), run.given(), run.typed()) == (None, frozenset(), {})


def test_a_token_that_is_cut_is_refused_and_never_drawn_anew(tmp_path: Path) -> None:
    file, variable = RunDir(tmp_path).diloco_token, "DILOCO_TOKEN_OF_NOBODY"
    token, path = token_of(file, variable)
    path.write_bytes(f"{token}\r\n".encode())
    assert token_of(file, variable)[0] == token
    for damaged in [b"", *cuts(token[:16].encode(), 0), b"\xff" * 64]:
        path.write_bytes(damaged)
        with pytest.raises(SetupError, match=str(path)):
            token_of(file, variable)
        assert path.read_bytes() == damaged


def test_tensorboard_reads_on_behind_a_file_that_it_cannot_read(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def write(*steps: int, **more: Any) -> None:
        with SummaryWriter(str(tmp_path), **more) as writer:
            for step in steps:
                writer.add_scalar("train/loss", 1.0 / step, step)

    write(1, 2, 3)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    last = len(whole) - 60
    for damaged in [b"", whole[:last], whole[:-1], crlf(whole), b"foreign\n" + whole, whole + b"foreign\n" * 9]:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        path.write_bytes(damaged)
        write(4, purge_step=4)
        assert [each.step for each in tiny.tensorboard(tmp_path).Scalars("train/loss")][-1] == 4


# -------------------------------------------------------------------------------------------------------- real resumes

WORDS = [
    "model=nano", "model.num_hidden_layers=1", "precision=fp32", "optimizer=adamw", "data=text", "data.seq_len=16",
    "data.tokenizer=bytes", "global_batch_size=4", "device=cpu", "deterministic=true", "lr_scheduler.warmup_steps=1",
    "logging_steps=1", "eval_steps=2", "max_eval_samples=2", "+callbacks.grad_norms={}",
    "callbacks.textgen.prompts=[a,b]", "callbacks.textgen.max_new_tokens=2",
]  # fmt: skip
"""The default recipe's callbacks, and gradient norms."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4 that was stopped behind step 4, and WHOLE, gone on to step 6."""
    root = tmp_path_factory.mktemp("made")
    (root / "text.txt").write_text("\n\n".join(f"the quick brown fox {n} jumps over the lazy dog" for n in range(200)))
    data = [f"data.files=[{root}/text.txt]", f"data.cache_dir={root}/cache"]
    stops = ["max_steps=6", "save_steps=2", "+callbacks.fault={_target_:faults.Fault,faults:[step-stop],rank:0}"]
    before = os.getcwd()
    os.chdir(root)
    with Process("train", *WORDS, *data, *stops, "callbacks.fault.after=3", f"output_dir={root}/RUN") as job:
        assert job.finish() == 75, job.output
    os.chdir(before)
    shutil.copytree(root / "RUN", root / "WHOLE")
    assert forgather("resume", f"{root}/WHOLE", "~callbacks.fault") == 0
    return root


def again(run: Path) -> Any:
    """What a run has computed and kept behind the resume."""
    texts = (run / "samples.txt").read_bytes()
    return tiny.training_curve(run)[-2:], texts[texts.index(b"=== step 6") :]


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edited(run: Path) -> None:
        (path,) = run.glob(name)
        path.write_bytes(change(path.read_bytes()))

    return edited


def add_rollbacks(run: Path) -> None:
    """Those that its checkpoint does not know have skipped nothing behind it, and one is damaged."""
    (run / "rollbacks.jsonl").write_bytes(b"foreign line\n")


REBUILT = "so the settings are those of"
RESUMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "samples, empty": (edit("samples.txt", lambda _: b""), ""),
    "samples, CRLF": (edit("samples.txt", crlf), ""),
    "samples, foreign": (edit("samples.txt", lambda whole: b"foreign\n" + whole), "samples.txt.bak"),
    "metrics, torn": (edit("metrics.jsonl", lambda whole: whole[:-9]), ""),
    "norms, foreign": (edit("gradient_norms.jsonl", lambda whole: whole + b"\n"), "gradient_norms.jsonl.bak"),
    "rollbacks, foreign": (add_rollbacks, "rollbacks.jsonl.bak"),
    "events, cut": (edit("tensorboard/*", lambda whole: whole[:-9]), ""),
    "exit.json, empty": (edit("exit.json", lambda _: b""), "exit.json: cannot be read"),
    "data_files.json, cut": (edit("data_files.json", lambda whole: whole[:-9]), "data_files.json.bak"),
    "config.yaml, empty": (edit("config.yaml", lambda _: b""), REBUILT),
    "config.yaml, cut": (edit("config.yaml", lambda whole: whole[: whole.index(b"  textgen:")]), REBUILT),
    "origin.yaml, empty": (edit("origin.yaml", lambda _: b""), "origin.yaml.bak"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resume_goes_on_as_if_nothing_were_damaged(
    case: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run, (damage, said) = shutil.copytree(made / "RUN", tmp_path / "run"), RESUMED[case]
    damage(run)
    done = printed(capsys, "resume", str(run), "~callbacks.fault")
    assert done.code == 0, done
    assert said in done.err + caplog.text
    assert again(run) == again(made / "WHOLE")
    assert bool(list(run.glob("*.bak*"))) == (".bak" in said or said == REBUILT)
    assert read_exit_record(RunDir(run)).state == "done"


def test_a_config_that_is_no_yaml_is_refused_and_once_emptied_made_again(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(made / "RUN", tmp_path / "run")
    edit("config.yaml", lambda whole: b"foreign line\n" + whole)(run)
    done = printed(capsys, "resume", str(run))
    assert done.code == 2
    assert done.err.count("error: ") == 1
    assert "or empty it, and forgather resume run makes it again" in done.err
    (run / "config.yaml").write_bytes(b"")
    assert forgather("resume", str(run), "~callbacks.fault") == 0
    assert again(run) == again(made / "WHOLE")
    shutil.rmtree(run / "checkpoints")
    (run / "config.1.yaml").write_bytes(b"")
    done = printed(capsys, "resume", str(run))
    assert done.code == 2
    assert "config.1.yaml: is empty or cut off; " in done.err


def test_settings_that_were_edited_into_a_checkpoint_count_beside_damaged_rollbacks(made: Path, tmp_path: Path) -> None:
    run = shutil.copytree(made / "RUN", tmp_path / "run")
    newest = max((run / "checkpoints").glob("step-*"))
    assert forgather("checkpoint", "edit", str(newest), "learning_rate=1e-5") == 0
    add_rollbacks(run)
    assert forgather("resume", str(run), "~callbacks.fault") == 0
    assert load_saved(RunDir(run).newest_config()).learning_rate == 1e-5


def test_two_kills_one_of_them_before_the_first_checkpoint(made: Path, tmp_path: Path) -> None:
    """The second start cuts the samples to nothing, and is killed before it has written one."""
    data = [f"data.files=[{made}/text.txt]", f"data.cache_dir={made}/cache", "max_steps=4"]
    fault = "+callbacks.fault={_target_:faults.Fault,faults:[step-kill,step-kill],rank:0,after:3}"
    run, samples = tmp_path / "run", tmp_path / "run" / "samples.txt"
    with Process("train", *WORDS, *data, fault, f"output_dir={run}") as job:
        assert job.finish() == -signal.SIGKILL, job.output
    assert samples.read_bytes().startswith(b"=== step 2 ===")
    with Process("resume", str(run), "callbacks.fault.after=1") as job:
        assert job.finish() == -signal.SIGKILL, job.output
    assert samples.read_bytes() == b""
    assert forgather("resume", str(run)) == 0
    assert samples.read_bytes().count(b"=== step ") == 2
    assert nothing_is_aside(run)
