"""docs/adding_options.md adds one option of each group by a folder: in a copy of the tree they train under two
strategies, resume, and are in what lists, explains and plans options."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_rooms import ROOT, run_here

BLOCKS: list[tuple[str, str]] = re.findall(
    r"^```python\n# (\S+)\n(.*?)^```", (ROOT / "docs/adding_options.md").read_text(), re.MULTILINE | re.DOTALL
)
"""(file, text) of the page."""
ADDED = {
    "optimizer": "lion", "lr_scheduler": "exponential", "loss": "focal", "precision": "ternary",
    "adapter": "orthogonal", "model": "gpt", "data": "lines", "trainer": "noisy", "callbacks": "ema",
}  # fmt: skip
SETTINGS = (
    "optimizer.betas", "lr_scheduler.min_lr_ratio", "loss.gamma", "precision.least", "adapter.from_adapter",
    "model.hidden_size", "data.files", "trainer.noise", "callbacks.ema.decay",
)  # fmt: skip
RUN = (
    "data=lines data.files=[text.txt] data.tokenizer=bytes seq_len=16 global_batch_size=4 max_steps=4 save_steps=2 "
    "logging_steps=1 device=cpu optimizer=lion lr_scheduler=exponential loss=focal +callbacks.ema={} "
)
ALONE = "trainer=noisy noise=0"
RANKS = "trainer=ddp nproc_per_node=2"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tree with the page's options, whose YAML the script has written."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for part in ("forgather_cli", "conf", "recipes", "scripts", "docs", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("golden", "*.pyc.*"))
    for name, text in BLOCKS:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as out:
            out.write(text)
    subprocess.run([sys.executable, "-P", "scripts/options"], cwd=tmp_path, check=True)
    (tmp_path / "text.txt").write_text("\n".join(f"line {n}: {'the quick brown fox ' * 3}" for n in range(60)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(run: str) -> dict[int, float]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_one_of_each_group_trains_under_two_strategies_resumes_and_is_listed_explained_and_planned(copy: Path) -> None:
    step, base = (
        "checkpoints/step-00000002",
        "model.path=base data.seq_len=16 max_steps=2 global_batch_size=4 device=cpu",
    )
    commands = {
        "options": "config options",
        **{setting: f"config explain {setting}" for setting in SETTINGS},
        "plan": f"plan {RUN} model=gpt precision=ternary {ALONE}",
        "alone": f"train {RUN} model=gpt precision=ternary {ALONE} output_dir=alone",
        "ranks": f"train {RUN} model=gpt precision=ternary {RANKS} output_dir=ranks",
        "other layout": f"train {RUN} model=gpt precision=ternary {ALONE} output_dir=other "
        f"resume_from_checkpoint=ranks/{step}",
        "base": f"train model=nano {RUN} lr_scheduler=cosine max_steps=2 output_dir=nano",
        "finalize": "finalize nano base",
        "adapter": f"train data=synthetic num_samples=64 adapter=orthogonal {base} output_dir=adapter",
        "adapter on ranks": f"train data=synthetic num_samples=64 adapter=orthogonal {base} {RANKS} output_dir=both",
    }
    said = {}
    for name, (code, output) in zip(commands, run_here(*commands.values()), strict=True):
        assert code == 0, (name, output)
        said[name] = output
    for group, name in ADDED.items():
        assert group == "callbacks" or re.search(rf"^ +{group} +{name} ", said["options"], re.MULTILINE), name
    for setting in SETTINGS:
        assert re.match(rf"{re.escape(setting)}: \S", said[setting]), said[setting]
    assert "GPT, vocabulary 257" in said["plan"]
    assert losses("ranks") == pytest.approx(losses("alone"), rel=1e-5)
    assert losses("other") == pytest.approx({3: losses("alone")[3], 4: losses("alone")[4]}, rel=1e-5)
    assert Path("other/ema.safetensors").exists()
    assert losses("both") == pytest.approx(losses("adapter"), rel=1e-5)
    code = """
import sys
from forgather_cli.callbacks.ema.settings import EmaSettings  # first of all
import forgather_cli
assert forgather_cli.EmaSettings is EmaSettings and hasattr(forgather_cli.CallbackSettings, "ema")
assert "LionSettings" in forgather_cli.__all__ and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x: Foo = 1", "LionSettings.x: name 'Foo' is not defined; import it there"),
        ("x: int = Foo", "name 'Foo' is not defined; import it there"),
        ("x: Own | None = None", "LionSettings.x: Unable to generate pydantic-core schema for <class"),
    ],
)
def test_what_cannot_be_a_setting_is_told_with_file_and_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("forgather_cli", "conf", "recipes"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    monkeypatch.chdir(tmp_path)
    [text] = [text for name, text in BLOCKS if name.endswith("lion/settings.py")]
    file = tmp_path / "forgather_cli/optim/lion/settings.py"
    file.parent.mkdir()
    file.write_text(text.replace("@settings", "class Own: ...\n\n\n@settings") + f"    {line}\n")
    [(code, output)] = run_here("config show")
    assert code == 2
    assert f"{file}:{len(file.read_text().splitlines())}: {said}" in output


@pytest.mark.full
def test_their_rows_pass_the_tests_of_their_groups(copy: Path) -> None:
    tables = [
        "tests/optim", "tests/loss/test_loss_options.py", "tests/data/test_data_options.py",
        "tests/precision/test_precision_options.py", "tests/adapters/test_adapters_options.py",
        "tests/models/test_model_options.py", "tests/strategies/test_every_strategy.py",
        "tests/callbacks/test_callbacks_strategies.py",
    ]  # fmt: skip
    words = ["-v", "-p", "no:cacheprovider", "-k", " or ".join(ADDED.values()), *tables]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    for name in ADDED.values():
        assert name in done.stdout
