"""The whole program: what a run leaves, how it is stopped and goes on, and what it looks like."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
from program import Process, forgather, printed, shown, until
from selection import some
from terminal import Terminal
from tiny import metrics as records
from tiny import training_curve as curve
from two_ranks import ended, hold, train_in_pool

from forgather_cli.config import options
from forgather_cli.config.schema import OptimizerSettings, SchedulerSettings
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("own_directory")

RECIPES = sorted(path.stem for path in options.shipped("recipes").glob("*.yaml"))
TINY = ["model=nano", "precision=fp32",
        "hidden_size=32", "seq_len=32", "global_batch_size=4", "logging_steps=1", "warmup_steps=1",
        "max_eval_samples=4", "device=cpu"]  # fmt: skip
LONG = [*TINY, "max_steps=120", "save_steps=50", "eval_steps=40", "deterministic=true", "callbacks=minimal"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a small text corpus with an evaluation split, tokenized once."""
    root = tmp_path_factory.mktemp("corpus")
    library = Path(os.__file__).parent
    for split, names in {"train": ["argparse.py", "ast.py", "copy.py"], "eval": ["bisect.py"]}.items():
        (root / split).mkdir()
        for name in names:
            (root / split / name).with_suffix(".txt").write_text((library / name).read_text())
    files = [f"data.files=[{root}/train/*.txt]", f"data.eval_files=[{root}/eval/*.txt]"]
    return ["data=text", *files, f"cache_dir={root}/cache"]


@pytest.fixture(scope="module")
def trained(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with the default callbacks, evaluated and saved at 4 and 8."""
    run = tmp_path_factory.mktemp("trained") / "run"
    steps = ["max_steps=8", "eval_steps=4", "save_steps=4", "load_best_model_at_end=true", f"output_dir={run}"]
    assert forgather("train", *TINY, *corpus, *steps) == 0
    return run


@pytest.fixture(scope="module")
def reference(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts."""
    root = tmp_path_factory.mktemp("reference")
    with Process("train", *LONG, *corpus, "output_dir=run", cwd=root) as job:
        assert job.finish() == 0, job.output
    return root / "run"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    reference: Path, corpus: list[str], tmp_path: Path, signum: signal.Signals
) -> None:
    with Process("train", *LONG, *corpus, *hold("on_step_end", 4), "output_dir=run", cwd=tmp_path) as job:
        job.read_until("step 3/")
        job.process.send_signal(signum)
        assert job.finish() == 75, job.output
    assert job.lines[-1] == "forgather resume run"
    told = ended()
    assert (told.code, told.reason) == (75, f"stopped by {signum.name}")
    assert told.step < 120
    assert RunDir(Path("run")).checkpoint_steps() == [told.step]
    assert forgather(*shlex.split(job.lines[-1])[1:]) == 0
    assert curve(Path("run")) == curve(reference)
    assert evaluations(Path("run")) == evaluations(reference)


def test_a_killed_run_goes_on_from_its_newest_checkpoint(reference: Path, corpus: list[str], tmp_path: Path) -> None:
    with Process("train", *LONG, *corpus, *hold("on_save", 50), "output_dir=run", cwd=tmp_path) as job:
        job.read_until("checkpoint saved")
        job.process.kill()
        assert job.finish() == -signal.SIGKILL
    assert forgather("resume", "run") == 0
    assert curve(Path("run")) == curve(reference)
    assert evaluations(Path("run")) == evaluations(reference)


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["eval_loss"]) for r in records(run) if "eval_loss" in r]


def test_a_stop_that_cannot_save_is_a_failure(corpus: list[str], tmp_path: Path) -> None:
    words = [*(word for word in LONG if not word.startswith("save_steps")), *hold("on_step_end", 4)]
    with Process("train", *words, *corpus, "save_strategy=no", "output_dir=run", cwd=tmp_path) as job:
        job.read_until("step 3/")
        Path("run/checkpoints").write_text("in the way")
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 1, job.output
    told = ended()
    assert told.code == 1
    assert re.search(r"stopped by SIGTERM at step \d+, but that step could not be saved \(see above\)", told.reason)
    assert "forgather resume" not in job.lines[-1]


HANGS = """
import sys, time
from forgather_cli.launch import signals, start
from forgather_cli.config.load import load_config
def hangs(config, run, rank):
    rank.poll()
    print("listening", flush=True)
    time.sleep(60)
signals.GRACE = 0.3
sys.exit(start.launch(lambda: load_config("default", ["output_dir=run"]), hangs))
"""


def test_a_step_that_hangs_ends_with_where_it_stands(tmp_path: Path) -> None:
    with Process(code=HANGS, cwd=tmp_path) as job:
        job.read_until("^listening")
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 1, job.output
    assert re.search(r"error: SIGTERM was not acted on within 0.3 s: rank 0 stands at .*:\d+ in hangs$", job.lines[-1])
    assert any("time.sleep(60)" in line or "in hangs" in line for line in job.lines[:-1])
    assert (ended().code, f"error: {ended().reason}") == (1, job.lines[-1])


def test_on_a_terminal_everything_is_aligned_and_control_c_leaves_it_clean(corpus: list[str]) -> None:
    job = Terminal("train", *TINY, *corpus, "max_steps=100000", "eval_steps=10", "save_steps=10", "output_dir=run")
    job.read_until(r"checkpoint saved: run/checkpoints/step-00000010")
    job.press(b"\x03")
    assert job.finish() == 75, job.output
    lines = [line for line in job.screen() if line]
    assert max(map(len, lines)) <= 80
    assert job.bars
    assert max(map(len, job.bars)) <= 75  # the terminal's ^C finds room behind it
    assert not [line for line in lines if line.startswith(("train ━", "eval  ━")) or "^C" in line]
    assert job.output.rindex("\x1b[?25h") > job.output.rindex("\x1b[?25l")  # the cursor is back
    assert "SIGINT: saving after this step; a second signal ends at once" in lines
    header = next(line for line in lines if line.startswith("   step   epoch      loss"))
    trained = next(line for line in lines if re.match(r" +1 +0\.00 +8\.\d{4} ", line))
    evaluated = next(line for line in lines if re.match(r" +10 +eval +\d\.\d{4} +\d\.\d{4}  perplexity ", line))
    for line, name in itertools.product((trained, evaluated), ("loss", "bits/byte")):
        assert re.match(r"\d\.\d{4}$", line[: header.index(name) + len(name)].split()[-1])
    assert not [line for line in lines if "warning" in line.lower()]
    newest = RunDir(Path("run")).checkpoint_steps()[-1]
    place = lines.index("run      run")
    assert re.fullmatch(
        rf"newest   run/checkpoints/step-{newest:08d}  (eval_|step )loss \d\.\d{{4}}( \(best\))?", lines[place + 1]
    )
    assert lines[-2].endswith(f"to resume from step {newest}:")
    assert lines[-1] == "forgather resume run"


def test_a_second_control_c_ends_at_once(corpus: list[str]) -> None:
    slow = ["per_device_train_batch_size=64", "global_batch_size=64", "model=tiny", "hidden_size=256", "seq_len=512"]
    job = Terminal("train", *TINY, *corpus, *slow, *hold("on_step_begin", 0), "max_steps=1000", "output_dir=run")
    job.read_until(r"train .*/1000")
    until(Path("run/held-0").exists)  # before a step begins one signal is enough
    job.press(b"\x03")
    job.read_until("a second signal ends at once")
    job.press(b"\x03")
    assert job.finish() == 130, job.output
    lines = [line for line in job.screen() if line]
    assert lines[-1] == "ended at once by SIGINT; there is no checkpoint"
    assert not [line for line in lines if line.startswith("train ")]
    assert job.output.rindex("\x1b[?25h") > job.output.rindex("\x1b[?25l")


def test_in_a_file_everything_is_said_once_and_in_plain_lines(trained: Path) -> None:
    log = (trained / "logs/rank-0.log").read_text()
    lines = log.splitlines()
    assert "\x1b" not in log
    events = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in lines]
    assert max(len(event) for event in events if not event.startswith(" ")) <= 200, "but samples' texts"
    for event in ("step 1/8 ", "step 4/8 ", "step 4 eval ", "step 8 eval ", "sample 1 at step 4", "results"):
        assert sum(line.startswith(event) for line in events) == 1, event
    assert sum("the best model is loaded" in line for line in lines) == 1
    assert sum(line.startswith("checkpoint saved: ") for line in events) == 2
    assert "WARNING" not in log
    assert lines[-2] == f"run      {trained}"
    assert re.fullmatch(rf"newest   {trained}/checkpoints/step-00000008  eval_loss \d\.\d{{4}} \(best\)", lines[-1])


READERS = [
    ["config", "show", "model=nano"], ["train", "model=nano", "--dry-run"], ["config", "options"],
    ["config", "recipes"], ["config", "explain", "precision"], ["eval", "RUN"], ["checkpoint", "verify", "RUN"],
    ["generate", "RUN", "--prompt", "x", "--max-new-tokens=3"], ["finalize", "RUN", "RUN-model", "--dry-run"],
]  # fmt: skip


@pytest.mark.parametrize("words", READERS, ids=lambda words: "-".join(words[:2]))
def test_what_is_read_fits_80_columns_or_is_one_json_document(
    trained: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.parent)
    words = [word.replace("RUN", trained.name) for word in words]
    done = printed(capsys, *words, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json()
    monkeypatch.setattr("forgather_cli.cli.output.NO_TERMINAL", 80)
    text = shown(capsys, *words)
    wide = [line for line in text.splitlines() if len(line.rstrip()) > 80]
    assert [line for line in wide if not re.fullmatch(r" *(\S+ {3,})?\S+", line.rstrip())] == []  # a path alone may be
    assert "…" not in text


CHATS = ("chat_finetune", "lora_finetune", "qlora_finetune")
ACCELERATE = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe: str, trained: Path, corpus: list[str]) -> None:
    Path("fsdp.yaml").write_text(ACCELERATE)
    shape = ["num_hidden_layers=2", "hidden_size=32", "intermediate_size=64", "num_attention_heads=2",
             "num_key_value_heads=1", *(["bpe_vocab_size=300"] if recipe.startswith("pretrain") else [])]  # fmt: skip
    weights = f"model.path={RunDir(trained).checkpoint(8)}/model"
    own = {
        **{name: [weights] for name in ("finetune", "qat")},
        **{name: [weights, "data.chat_template=chatml"] for name in ("finetune_mix", "dpo")},
        **{name: [weights, "data.chat_template=chatml", f"data.add_tokens={name == CHATS[0]}"] for name in CHATS},
        "pretrain_1b_pipeline": [*shape, "nproc_per_node=2", "n_microbatches=2", "per_device_eval_batch_size=2"],
        "pretrain_1b_nodes": [*shape, "nnodes=1", "nproc_per_node=2"],
        "pretrain_1b_accelerate": [*shape, "accelerate_config=fsdp.yaml"],
    }
    if is_paired := recipe.startswith("qwen3_encdec"):
        sides = ["max_encoder_length=64", "max_decoder_length=64", "pack_encoder=64", "max_seq_length=64"]
        no_trackers = ["~callbacks.trackers"] if recipe.endswith("ul2") else []
        own[recipe] = [*shape, *sides, *no_trackers, "head_dim=null", "vocab_size=null", "num_sentinel_tokens=16",
                       "model.max_position_embeddings=null", "data.source=text",
                       "dataloader_num_workers=0"]  # fmt: skip
    batch = 2 if recipe.endswith("pipeline") else 1
    steps = ["max_steps=2", "seq_len=32", "global_batch_size=2", f"per_device_train_batch_size={batch}",
             "warmup_steps=1", "max_eval_samples=2", "eval_steps=2", "callbacks.textgen.max_new_tokens=4",
             "device=cpu"]  # fmt: skip
    data = corpus
    if recipe in (*CHATS, "finetune_mix"):
        answer = json.dumps({"messages": [{"role": "assistant", "content": "Hello"}]})  # begins within 32 bytes
        Path("chats.jsonl").write_text(f"{answer}\n" * 40)
        data = ["data.files=[chats.jsonl]", "data.eval_files=[chats.jsonl]", "cache_dir=cache"]
    if recipe == "finetune_mix":
        Path("notes").mkdir()
        Path("notes/page.md").write_text("A page of some words, again and again.\n" * 20)
        data = ["data.sources.texts.eval_fraction=0", "cache_dir=cache"]
    if recipe == "dpo":
        pairs = [json.dumps({"prompt": "a", "chosen": f"b{n}", "rejected": f"c{n}"}) for n in range(40)]
        Path("pairs.jsonl").write_text("\n".join(pairs))
        data = ["data.files=[pairs.jsonl]", "data.eval_files=[pairs.jsonl]", "cache_dir=cache"]
    if is_paired:
        steps.remove("seq_len=32")
        data = [word for word in corpus if not word.startswith("data=")]
    words = [*data, *own.get(recipe, shape), *steps, "output_dir=run"]
    if recipe.startswith("pretrain_1b_") or recipe.endswith("ul2"):  # on two ranks
        answers = train_in_pool(Path.cwd(), words, recipe)
        assert [code for code, _ in answers] == [0, 0], answers[0][1]
    else:
        assert forgather("train", recipe, *words) == 0
    assert RunDir(Path("run")).checkpoint_steps() == [2]
    assert all(np.isfinite(loss) for _, loss, _ in curve(Path("run")))


OPTIMIZERS = [option.type for option in OptimizerSettings.members]
SCHEDULERS = [option.type for option in SchedulerSettings.members]
CHOICES = [
    "precision=bf16 data.tokenizer=bpe bpe_vocab_size=300 max_grad_norm=0",
    "loss=linear_cross_entropy packing=best_fit isolate_documents=true seed=-1",
    "data=synthetic gradient_checkpointing=true construct_model_on=device",
    "data=tokens dataloader_num_workers=2 eval_strategy=no",
    "packing=pad isolate_documents=true per_device_train_batch_size=1 async_save=false",
    "isolate_documents=true torch_compile=true torch_compile_backend=eager",
    "max_steps=-1 num_train_epochs=0.005 construct_model_on=cpu",
    "optimizer=adamw fuse_optim_with_backward=true max_grad_norm=null logging_strategy=no",
]
BESIDE = max(len(CHOICES), len(OPTIMIZERS), len(SCHEDULERS))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.13's dynamo reads it itself
@pytest.mark.parametrize("number", some(range(BESIDE), 1, 5, 7))
def test_every_option_trains_two_steps(number: int, corpus: list[str]) -> None:
    """Beside each choice an optimizer and a schedule, so that all of them train."""
    choice, data = CHOICES[number % len(CHOICES)], corpus
    if "data=synthetic" in choice:
        data = ["num_samples=64", "num_eval_samples=4"]
    if "data=tokens" in choice:
        (np.arange(4000) % 257).astype(np.uint16).tofile("train.bin")
        data = ["data.files=[train.bin]", "cache_dir=cache"]
    with_it = [f"optimizer={OPTIMIZERS[number % len(OPTIMIZERS)]}"] if "optimizer=" not in choice else []
    with_it += [f"lr_scheduler={SCHEDULERS[number % len(SCHEDULERS)]}"]
    words = [*TINY, *data, "callbacks=minimal", "max_steps=2", "output_dir=run", *with_it, *choice.split()]
    if "_strategy=no" in choice:
        words.remove("logging_steps=1" if "logging" in choice else "max_eval_samples=4")
    assert forgather("train", *words) == 0
    points = curve(Path("run"))
    assert ([step for step, _, _ in points] or [2])[:2] == ([1, 2] if "logging" not in choice else [2])
    assert all(np.isfinite([loss, norm]).all() for _, loss, norm in points)
    assert RunDir(Path("run")).checkpoint_steps()
