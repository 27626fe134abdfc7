"""The commands: what they print, what they refuse, and that most of them do without torch."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from program import SMALL, Result, modules_after, printed, write
from saving import damage, flip, sign
from tiny import metrics

from forgather_cli import __version__
from forgather_cli.cli import app
from forgather_cli.config.load import load_config
from forgather_cli.launch.start import launch
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.summary import summarize
from forgather_cli.worker import work

Forgather = Callable[..., Result]


@pytest.fixture
def forgather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Forgather:
    """Runs the program's main in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERMINAL_WIDTH", "120")
    return partial(printed, capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with checkpoints at 2 and 4."""
    run = tmp_path_factory.mktemp("trained") / "run"
    settings = ["max_steps=4", "save_steps=2", "eval_steps=2", f"output_dir={run}"]
    assert launch(lambda: load_config("default", [*SMALL, *settings]), work) == 0
    return run


WITHOUT_TORCH = """
import json, os, sys
from forgather_cli.cli import app
codes, loaded = [], []
for words in json.loads(sys.argv[1]):
    sys.argv = ["forgather", *words]
    os.environ.pop("_FORGATHER_COMPLETE", None)
    if words[:1] == ["COMPLETE"]:
        sys.argv = sys.argv[:1]
        os.environ |= {"_FORGATHER_COMPLETE": "complete_bash", "COMP_WORDS": words[1], "COMP_CWORD": words[2]}
    try:
        app.main()
    except SystemExit as ended:
        codes.append(ended.code)
    loaded.append(sorted({"torch", "transformers", "accelerate", "numpy"} & set(sys.modules)))
print(json.dumps([codes, loaded]), file=sys.stderr)
"""


def test_help_config_mistakes_and_looking_at_runs_do_without_torch(trained: Path, tmp_path: Path) -> None:
    commands = ["train", "resume", "plan", "eval", "generate", "finalize", "config show", "config options",
                "config recipes", "checkpoint list", "checkpoint inspect", "checkpoint verify", "checkpoint average",
                "checkpoint edit", "logs summary", "logs plot", "control list", "control status", "control cleanup",
                "control save", "control abort", "runs list", "runs remove", "logs follow", "cache list", "cache prune",
                "data show", "doctor", "control", "serve"]  # fmt: skip
    helps = [["--help"], *([*command.split(), "--help"] for command in commands)]
    mistakes = [["train", "max_stepz=1", "trainer=dpp"], ["train", "nope"], ["resume", "nope"], ["eval", "nope"],
                ["finalize", "nope", "x"], ["serve", "nope.gguf"], ["logs", "plot", str(trained), "--x", "steps"],
                ["train", "lr=1,2", "max_steps=1", "-m"]]  # fmt: skip
    unknown = [["control", "status", str(trained)], ["control", "stop", "nope"]]
    newest = str(trained / "checkpoints/step-00000004")
    looks = [["config", "show"], ["config", "options"], ["config", "recipes"], ["logs", "summary", str(trained)],
             ["runs", "list", str(trained.parent)], ["logs", "follow", str(trained)], ["cache", "list"],
             ["checkpoint", "list", str(trained)], ["checkpoint", "inspect", newest], ["checkpoint", "verify", newest],
             ["control", "list"], ["control", "cleanup"], ["--version"],
             ["COMPLETE", "forgather train model=n", "2"], ["COMPLETE", "forgather resume x max_st", "3"],
             ["logs", "plot", str(trained), "-o", str(tmp_path / "plot.svg")]]  # fmt: skip
    words = json.dumps([*helps, *mistakes, *unknown, *looks])
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, words], capture_output=True, text=True, check=True)
    codes, loaded = json.loads(done.stderr.splitlines()[-1])
    assert loaded == [[]] * (len(codes) - 1) + [["numpy"]]  # matplotlib's
    assert codes == [0] * len(helps) + [2] * len(mistakes) + [1] * len(unknown) + [0] * len(looks)
    assert "model=nano" in done.stdout
    assert "save_and_stop" in done.stdout  # control's help
    assert f"forgather {__version__}\n" in done.stdout


WITHOUT_COMPILER = WITHOUT_TORCH.replace("codes.append(ended.code)", "codes.append(ended.code or 0)").replace(
    '{"torch", "transformers", "accelerate", "numpy"}', '{"torch", "torch._dynamo", "transformers"}'
)


def test_one_device_trains_and_reads_models_without_the_compiler(tmp_path: Path) -> None:
    """Its import takes as long as torch's own."""
    run = str(tmp_path / "run")
    commands = [["train", *SMALL, "max_steps=2", "save_steps=1", f"output_dir={run}"], ["resume", run, "max_steps=3"],
                ["eval", run], ["generate", run, "--prompt", "a", "--max-new-tokens", "2"], ["plan", *SMALL],
                ["checkpoint", "verify", run]]  # fmt: skip
    words = [sys.executable, "-c", WITHOUT_COMPILER, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stderr.splitlines()[-1]) == [[0] * len(commands), [["torch"]] * len(commands)]


COMMAND = "import contextlib\nfrom forgather_cli.cli import app\nwith contextlib.suppress(SystemExit): app.main()"


def test_help_and_a_mistake_in_a_setting_import_little(tmp_path: Path) -> None:
    others = {where.partition(":")[0] for where in app.COMMANDS.values()} - {"forgather_cli.cli.train"}
    for words, more in ((["--help"], {"hydra", "omegaconf"}), (["train", "learning_rte=1"], {"rich", *others})):
        loaded = modules_after(COMMAND, *words, cwd=tmp_path)
        assert {"torch", "numpy", "http.client", "uvicorn", "h11", *more} & loaded == set()


MODULES = """
import os, sys
from pathlib import Path
from forgather_cli.callbacks.base import TrainerCallback

class Modules(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        Path(f"modules-{os.environ['RANK']}").write_text(" ".join(sys.modules))
"""


@pytest.mark.full  # three interpreters
def test_two_ranks_and_their_launcher_import_what_they_use_alone(tmp_path: Path) -> None:
    """torch's compiler, with sympy, costs each as much as torch itself."""
    (tmp_path / "seen.py").write_text(MODULES)
    words = ["train", *SMALL, "trainer=ddp", "nproc_per_node=2", "max_steps=1", "save_strategy=no", "output_dir=run",
             "callbacks=default", "~callbacks.textgen", "+callbacks.seen._target_=seen.Modules"]  # fmt: skip
    of_launcher = modules_after(COMMAND, *words, cwd=tmp_path)
    unused = {"torch._dynamo", "torch._inductor", "sympy", "transformers", "accelerate", "datasets", "torchdata",
              "tensorboard", "pandas", "matplotlib", "uvicorn"}  # fmt: skip
    assert unused & of_launcher == set()
    assert "numpy" in of_launcher
    for rank in range(2):
        of_rank = set((tmp_path / f"modules-{rank}").read_text().split())
        assert (unused | {"hydra", "omegaconf", "typer"}) & of_rank == set()


def test_completion_offers_settings_options_and_recipes(
    forgather: Forgather, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def complete(line: str) -> list[str]:
        monkeypatch.setenv("_FORGATHER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        done = forgather()
        assert done.err == ""
        return done.out.split()

    assert complete("forgather data show max_st") == ["max_steps="]
    assert complete("forgather train trainer = ") == ["ddp", "fsdp2", "pipeline", "single"]
    assert "default" in complete("forgather train de")
    assert complete("forgather resume somewhere save_str") == ["save_strategy="]
    for name, text in {"model/zzz": "type: decoder\n", "recipes/zebra": "# mine\ndefaults: [train, _self_]\n"}.items():
        write(tmp_path / f"own/{name}.yaml", text)
    assert complete("forgather train model=z") == []
    assert complete("forgather train --config-dir own model=z") == ["model=zzz"]
    assert complete("forgather resume somewhere --config-dir own model = z") == ["zzz"]
    assert complete("forgather train --config-dir own zeb") == ["zebra"]


def test_every_mistake_has_a_line_and_the_exit_code_is_2(forgather: Forgather) -> None:
    done = forgather("train", "learning_rat=1", "seq_len=x", "model=tinyy", "n_microbatches=8", "a b=1", "data=text")
    assert (done.code, done.out) == (2, "")
    head, *lines = done.err.splitlines()
    assert head == "error: 6 config mistakes"
    names = ("a b", "data.files", "learning_rat", "model=tinyy", "n_microbatches", "seq_len")
    assert all(line.startswith(f"  - {name}") for line, name in zip(sorted(lines), names, strict=True))
    assert list(Path().iterdir()) == []


PRINT = f"train {' '.join(SMALL)} --print-sbatch"
CONTROL = "train callbacks.control"
MISTAKES = {
    "train default again": "again: not an override; write key=value (the recipe is default)",
    "resume run extra": "extra: not an override; write key=value",
    "train --json": "--json: training prints no document",
    "train --max_steps 10": "--max_steps: settings have no dashes; write max_steps=",
    "train --jobs 2": "add --multirun",
    "train --time=01:00:00": "--time: .* ; add --print-sbatch",
    f"{PRINT} --time=5:00": "--time: must be HH:MM:SS or D-HH:MM:SS",
    f"{PRINT} --time=00:09:59": "--time: must be .* 10 minutes or more",
    f"{PRINT} -m": "--print-sbatch: .* ; leave out --multirun",
    f"{PRINT} trainer=ddp device=cuda": "nproc_per_node: .* ; set those of a node",
    f"{PRINT} trainer=ddp max_restarts=1": "max_restarts: .* Slurm .* ; leave it out",
    f"{CONTROL}.port=0 callbacks.control.h=1": "control.port: must be\ncontrol.h: unknown",
    f"{CONTROL}.port=70000": "control.port: must be",
    f"{CONTROL}.auth_token=short job_id=../up": "job_id: must be at most 100\nmust be 16 or more",
    f"{CONTROL}.enable_http=false callbacks.control.port=8901": "control.port: nothing reads",
    f"{CONTROL}.disable_auth=true callbacks.control.auth_token=aaaaaaaaaaaaaaaa": "nothing reads it",
    "train job_id=latest": "job_id: latest stands for the newest job",
    "train ~callbacks.control job_id=mine": "add '+callbacks.control={}' or leave job_id out",
    "config options modle": "modle: no such group; groups: model, data",
    "eval .": ".: is no run (config.yaml), no checkpoint",
    "checkpoint list nowhere": "nowhere: no such directory",
    "checkpoint list .": ".: has no checkpoints",
    "checkpoint verify .": "not a Forgather checkpoint",
    "logs summary nowhere": "no such directory",
    "logs summary no*": "matches no run",
    "logs summary .": "has no metrics.jsonl or config.yaml",
    "logs summary . --json --markdown": "use one of them",
}


@pytest.mark.parametrize("words", MISTAKES, ids=[words.replace(PRINT, "... --print-sbatch") for words in MISTAKES])
def test_a_mistake_is_said_in_one_message(forgather: Forgather, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = forgather(*words.split())
    assert done.code == 2
    for told in MISTAKES[words].splitlines():
        assert re.search(".*".join(map(re.escape, told.split(" .* "))), done.err), done.err
    assert "Traceback" not in done.err
    assert not list(Path().iterdir())


def test_config_show_is_what_a_run_would_get(forgather: Forgather) -> None:
    write("own/model/wide.yaml", "# Wide.\ndefaults: [decoder, _self_]\nhidden_size: 512\n")
    words = ["config", "show", "~callbacks", "++model.qk_norm=true", "max_steps=5", "model=wide"]
    tree = yaml.safe_load(forgather(*words, "--config-dir", "own").out)
    assert (tree["callbacks"], tree["max_steps"], tree["model"]["hidden_size"]) == ({}, 5, 512)
    same = forgather(*words, "--config_dir", "own", "--json").json()
    assert {**tree, "output_dir": ""} == {**same, "output_dir": ""}


def test_dry_run_shows_plan_and_command_then_the_config_and_writes_nothing(forgather: Forgather) -> None:
    done = forgather("train", *SMALL, "max_steps=3", "--dry-run")
    assert done.code == 0, done.err
    shown = ("tokens per step", "by the command  forgather train default model=nano", "max_steps: 3")
    order = [done.out.index(text) for text in shown]
    assert order == sorted(order)
    document = forgather("train", *SMALL, "max_steps=3", "--dry-run", "--json").json()
    assert document["config"]["max_steps"] == document["plan"]["steps"] == 3
    assert document["command"][:3] == ["forgather", "train", "default"]
    assert list(Path().iterdir()) == []


def test_plan_counts_parameters_operations_and_bytes(forgather: Forgather) -> None:
    hidden, head_dim, layers, inner, vocab, seq_len = 64, 32, 2, 192, 257, 16
    words = ("optimizer=adamw", "max_steps=7", "gradient_accumulation_steps=2")
    plan = forgather("plan", *SMALL, *words, "--params", "--json").json()
    block = 4 * hidden * hidden + 3 * hidden * inner
    norms = (2 * layers + 1) * hidden + 2 * layers * head_dim
    total = 2 * vocab * hidden + layers * block + norms
    assert plan["num_parameters"] == total == sum(row["numel"] for row in plan["parameters"])
    assert plan["parameters_by_kind"] == {
        "embedding": vocab * hidden, "attention": layers * 4 * hidden**2, "mlp": layers * 3 * hidden * inner,
        "norm": norms, "head": vocab * hidden,
    }  # fmt: skip
    assert (plan["micro_batch"], plan["accumulation"], plan["tokens_per_step"]) == (2, 2, 4 * seq_len)
    assert plan["flops_per_token"] == 6 * (total - vocab * hidden) + 12 * layers * hidden * seq_len
    assert plan["weight_bytes"] == plan["gradient_bytes"] == 4 * total
    assert plan["optimizer_bytes"] == 8 * total + 4 * len(plan["parameters"])
    groups = {row["name"]: (row["group"], row["weight_decay"]) for row in plan["parameters"]}
    assert groups["model.norm.weight"] == ("no_decay", 0.0)
    assert groups["lm_head.weight"] == ("default", 0.1)
    assert (plan["steps"], plan["train_tokens"]) == (7, 64 * seq_len)
    assert (plan["precision"], plan["auto_because"]) == ("fp32", "")


def test_plan_of_other_optimizers_precisions_and_lengths(forgather: Forgather, tmp_path: Path) -> None:
    auto = ["plan", *SMALL, "precision=auto", "max_steps=7"]
    plan = forgather(*auto, "--json").json()
    told = rf"^ *precision +{plan['precision']} \(auto: {re.escape(plan['auto_because'])}\)"
    assert re.search(told, forgather(*auto).out, re.MULTILINE)
    muon = forgather("plan", *SMALL, "max_steps=1", "optimizer=muon", "--params", "--json").json()
    kinds = {(row["kind"], row["optimizer"]) for row in muon["parameters"]}
    by_muon, by_adamw = ("attention", "mlp"), ("embedding", "head", "norm")
    assert kinds == {*((kind, "muon") for kind in by_muon), *((kind, "adamw") for kind in by_adamw)}
    assert forgather("plan", *SMALL, "optimizer=sgd", "--json").json()["optimizer_bytes"] == 0
    epochs = forgather("plan", *SMALL, "max_steps=-1", "num_train_epochs=2.5", "--json").json()
    assert epochs["steps"] == 2.5 * 64 / 4
    (tmp_path / "a.txt").write_text("some text " * 100)
    words = ["plan", "data=text", "data.files=[a.txt]", "cache_dir=cache", "max_steps=-1"]
    unknown = forgather(*words, "--json").json()
    assert (unknown["steps"], unknown["train_tokens"]) == (None, None)
    assert not (tmp_path / "cache").exists()
    assert "not tokenized yet" in forgather(*words).out


def test_checkpoint_inspect_shows_every_tensor(forgather: Forgather, trained: Path) -> None:
    from safetensors import safe_open

    document = forgather("checkpoint", "inspect", str(trained), "--json").json()
    assert document["manifest"]["step"] == 4
    shapes = {each["name"]: each["shape"] for each in document["tensors"] if each["file"].startswith("model/")}
    with safe_open(trained / "checkpoints/step-00000004/model/model.safetensors", "pt") as tensors:
        assert shapes == {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    assert "lm_head.weight" in forgather("checkpoint", "inspect", str(trained / "checkpoints/step-00000004")).out


def test_checkpoint_list_shows_local_time_and_the_loss_of_the_step(
    forgather: Forgather, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = forgather("checkpoint", "list", str(trained), "--json").json()
    assert [(each["step"], each["final"]) for each in found] == [(2, False), (4, True)]
    best = min(each["metrics"]["eval_loss"] for each in found)
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "XYZ-9:30")  # 9.5 hours east of Greenwich, where nobody runs this
        time.tzset()
        table = forgather("checkpoint", "list", str(trained)).out
    time.tzset()
    there = datetime.datetime.fromisoformat(found[-1]["created"]) + datetime.timedelta(hours=9.5)
    for word in (f"{there:%Y-%m-%d %H:%M:%S}", "step loss", "best", "final", f"{best:.4f}"):
        assert word in table


def test_checkpoint_verify_names_the_damaged_file(forgather: Forgather, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    assert forgather("checkpoint", "verify", str(copy)).code == 0
    damage(copy / "checkpoints/step-00000004/model/model.safetensors", flip(-1))
    done = forgather("checkpoint", "verify", str(copy))
    assert done.code == 1
    assert "step-00000002: ok" in done.out
    assert "model/model.safetensors has other content" in done.out
    checked = forgather("checkpoint", "verify", str(copy), "--json")
    assert checked.code == 1
    assert [each["valid"] for each in checked.json()] == [True, False]
    other = copy / "checkpoints/step-00000002"
    sign(other, {**json.loads((other / "manifest.json").read_text()), "files": {}})
    alone = forgather("checkpoint", "verify", str(other))
    assert alone.code == 1
    assert "step-00000002: damaged" in alone.out
    assert "it names no files" in alone.out


def test_logs_summary_is_what_the_metrics_say(forgather: Forgather, trained: Path, tmp_path: Path) -> None:
    [summary] = forgather("logs", "summary", str(trained), "--json").json()
    records = metrics(trained)
    losses = [record["loss"] for record in records if "loss" in record]
    evals = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert (summary["first_loss"], summary["last_loss"], summary["best_loss"]) == (losses[0], losses[-1], min(losses))
    assert (summary["last_eval_loss"], summary["best_eval_loss"]) == (evals[-1], min(evals))
    assert (summary["step"], summary["max_steps"], summary["state"]) == (4, 4, "done")
    assert summary["tokens"] == 4 * 4 * 16
    assert summary["seconds"] > 0
    # of a log that is torn
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n{"step": 3, "lo')
    torn = summarize(RunDir(tmp_path))
    assert (torn.step, torn.first_loss, torn.last_loss, torn.state) == (2, 2.0, 2.0, "cut")


INTERRUPTED = """
import os, signal, sys
module = sys.argv[1]
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # as a terminal's job has it
sys.meta_path.insert(0, CtrlC())
from forgather_cli.terminal import bars
from forgather_cli.__main__ import run
bars.SILENCE = 3600.0
sys.argv = ["forgather", "train", "model=nano", "max_steps=1", "output_dir=run"]
run()
"""


@pytest.mark.parametrize("module", ["forgather_cli.cli.train", "numpy._core.multiarray"])
def test_ctrl_c_while_modules_are_imported_ends_the_command_without_a_word(module: str, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, module], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
