"""The reference's log-probabilities: when they are computed and by what, what a kill leaves, what a resume compares."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
from program import Process, forgather, refusal
from safetensors.torch import load_file

from forgather_cli import compose
from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.data.cache import Cache
from forgather_cli.errors import DataError
from forgather_cli.preference.reference import _written
from forgather_cli.run_dir import RunDir

LN_2 = 0.69314718
DATA = (
    "data=preference", "data.files=[pairs.jsonl]", "data.eval_fraction=0.1", "data.chat_template=chatml",
    "data.tokenizer=bytes", "data.cache_dir=cache", "data.seq_len=64", "loss=dpo", "precision=fp32", "device=cpu",
)  # fmt: skip
SMALL = (
    "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
)  # fmt: skip
RUN = (
    *DATA, "callbacks=minimal", "logging_steps=1", "warmup_steps=1", "learning_rate=1e-3", "global_batch_size=8",
    "max_steps=6", "save_steps=3", "eval_steps=3",
)  # fmt: skip


def write_pairs(number: int = 80) -> None:
    words = ["red", "blue", "green", "sky", "sea", "tree", "house", "dog", "cat", "bird"]
    rows = [
        {
            "prompt": f"{words[n % 10]} {words[n // 10 % 10]} {n}",
            "chosen": "yes " + words[n % 7] * (1 + n % 3),
            "rejected": "no " + words[n % 9] * (1 + n % 2),
        }
        for n in range(number)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_pairs()


def train(run: str, *words: str) -> None:
    assert forgather("train", "model=nano", *SMALL, *RUN, f"output_dir={run}", *words) == 0


def logged(run: str, name: str = "loss") -> dict[int, float]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


def weights(run: str, step: int = 6) -> dict[str, torch.Tensor]:
    return parity.checkpoint_tensors(RunDir(Path(run)), step)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def references(cache: str = "cache") -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in Path(cache, "references").glob("[!.]*/values")}


# ----------------------------------------------------------------------------------------------------- under a strategy


LAYOUTS = parity.with_others("single", "ddp 2", "fsdp2 2", "1F1B 2", "1F1B 2x2")


def test_every_strategy_computes_it_and_trains_alike(tmp_path: Path) -> None:
    found = {}
    for name in LAYOUTS:
        # ranks stand in the directory of whoever needed them first
        here = f"data.files=[{tmp_path / 'pairs.jsonl'}]", f"data.cache_dir={tmp_path / name}"
        settings = (*DATA[1:], *here, "global_batch_size=8", "max_steps=5")
        base = ("data=preference", *(word for word in parity.BASE if "seq_len" not in word and "max_eval" not in word))
        found[name] = parity.train(parity.LAYOUTS[name], settings, tmp_path / "runs" / name, base=base)
    single = found.pop("single")
    assert single.losses[0] == pytest.approx(LN_2, abs=1e-6)
    wanted = np.concatenate([np.frombuffer(each) for _, each in sorted(references(str(tmp_path / "single")).items())])
    for name, result in found.items():
        assert references(str(tmp_path / name)).keys() == references(str(tmp_path / "single")).keys()
        values = [np.frombuffer(each) for _, each in sorted(references(str(tmp_path / name)).items())]
        np.testing.assert_allclose(np.concatenate(values), wanted, rtol=1e-5)
        assert result.losses == pytest.approx(single.losses, rel=1e-5)
        assert result.norms == pytest.approx(single.norms, rel=1e-4)


# ------------------------------------------------------------------------------------------ what it is the model of


def test_the_first_loss_is_ln_2_though_the_settings_drop_units(capsys: pytest.CaptureFixture[str]) -> None:
    train("fresh", "model.attention_dropout=0.5", "model.residual_dropout=0.5", "max_steps=3")  # blocks begin with 0
    base = f"model.path={finalized('fresh', 'base')}", "data.tokenizer=base", "data.chat_template=null"
    assert forgather("train", *RUN, *base, "output_dir=run") == 0
    assert logged("run")[1] == pytest.approx(LN_2, abs=1e-6)
    assert logged("run", "rewards/margins")[1] == 0
    assert logged("run", "eval_rewards/accuracies")[6] > 0.9
    assert not logged("run", "eval_perplexity")
    assert "nothing is dropped" in capsys.readouterr().err
    metrics = {name for line in Path("run/metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert {"targets", "tokens", "logps/chosen", "logps/rejected", "rewards/chosen", "eval_logps/rejected"} <= metrics


def finalized(run: str, path: str) -> str:
    assert forgather("finalize", run, path) == 0
    return path


def test_a_continued_adapter_is_on_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    train("base-run")
    base = (
        "train",
        f"model.path={finalized('base-run', 'base')}",
        *RUN,
        "data.tokenizer=base",
        "data.chat_template=null",
    )
    assert forgather(*base, "adapter=lora", "output_dir=first", "learning_rate=1e-2") == 0
    assert logged("first")[1] == pytest.approx(LN_2, abs=1e-6)
    finalized("first", "adapter")
    again = (*base, "adapter=lora", "adapter.from_adapter=adapter", "output_dir=second")
    assert forgather(*again) == 0
    assert logged("second")[1] == pytest.approx(LN_2, abs=1e-6)
    # of the model with its adapter, not of its base
    assert logged("second", "logps/chosen")[1] > logged("first", "logps/chosen")[1] + 1
    # a policy without it is another model
    without = (*again[:-1], "output_dir=third", f"+callbacks.off._target_={__name__}.Off")
    assert "training does not begin" in refusal(capsys, *without)
    assert not RunDir(Path("third")).checkpoint_steps()


class Off(TrainerCallback):
    """Switches the adapters off once the reference is computed."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for name, parameter in kwargs["model"].named_parameters():
                if "lora" in name:
                    parameter.zero_()


def test_it_may_be_another_model_of_the_same_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    train("other-run")
    finalized("other-run", "other")
    train("run", "seed=7", "loss.reference=other", "max_steps=1")
    assert abs(logged("run")[1] - LN_2) > 1e-3
    assert logged("run", "rewards/chosen")[1] != 0
    train("same", "max_steps=1")
    assert logged("same")[1] == pytest.approx(LN_2, abs=1e-6)
    # a model of another size, and one whose tokens are others
    assert (
        forgather("train", "model=nano", "data=synthetic", "model.vocab_size=300", "max_steps=1", "output_dir=s") == 0
    )
    finalized("s", "small")
    command = ("train", "model=nano", *SMALL, *RUN, "output_dir=refused")
    assert "another vocabulary" in refusal(capsys, *command, "loss.reference=small")
    assert "loss.reference" in refusal(capsys, *command, "loss.reference=nowhere")


def test_a_script_evaluates_what_the_reference_is_known_of() -> None:
    """Its loss would be that of pairs which the model does not tell apart, or nan."""
    trainer = compose("default", "model=nano", *SMALL, *RUN, "max_steps=3", "output_dir=run")
    unread = trainer.eval_dataset._dataset
    with pytest.raises(DataError, match="what the reference says of these pairs is not known"):
        trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == logged("run", "eval_loss")[3]
    for evaluate in (trainer.evaluate, trainer.predict):
        with pytest.raises(DataError, match="what the reference says of these pairs is not known"):
            evaluate(unread)
    trainer.eval_dataset = unread
    with pytest.raises(DataError, match="what the reference says of these pairs is not known"):
        trainer.evaluate()
    alone = compose("default", "model=nano", *SMALL, *RUN, "loss.variant=orpo", "output_dir=orpo")  # it has none
    assert alone.evaluate()["eval_loss"] == alone.evaluate(alone.eval_dataset._dataset)["eval_loss"] > 1


# ------------------------------------------------------------------------------------------ kills, stops, resumes


# Each pair takes 20 ms more, and all take half a minute: whoever waits for some of them sees them in time.
SLOWLY = """
import time
from forgather_cli.cli import app
from forgather_cli.preference import reference

class Slow(reference.Bar):
    def add(self, count):
        time.sleep(0.02)
        super().add(count)

reference.Bar = Slow
app.main()
"""


def begun(run: str, *words: str) -> Process:
    """A run of many pairs, one at a time, which has computed some of the reference."""

    def size() -> int:
        return sum(path.stat().st_size for path in Path("cache/references").glob(".tmp-*/part-*"))

    before = size()
    process = Process("train", "model=nano", *SMALL, *RUN, f"output_dir={run}", *words, code=SLOWLY)
    process.until(lambda: size() > before + 1200)
    return process


def test_killed_while_it_is_computed_the_run_goes_on_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(1500)
    many = ("per_device_train_batch_size=1", "gradient_accumulation_steps=8", "max_eval_samples=8")
    train("whole", *many, "data.cache_dir=undisturbed")
    wanted = references("undisturbed")
    with begun("run", *many) as process:
        process.process.send_signal(signal.SIGKILL)
        process.finish()
    assert not references()
    with begun("run", *many) as process:  # a stop is noticed while it is computed, and leaves what there is
        process.process.send_signal(signal.SIGTERM)
        assert process.finish() == 75, process.output
    assert RunDir(Path("run")).checkpoint_steps() == [0]
    assert not references()
    shutil.copytree("cache", "kept")
    assert forgather("resume", "run") == 0
    assert references() == wanted
    assert equal(weights("run"), weights("whole"))
    # what a kill leaves is what is used
    changed = set()
    for part in Path("kept/references").glob(".tmp-*/part-*"):
        records = np.frombuffer(part.read_bytes(), PARTS).copy()
        records["values"] += 1e-9
        part.write_bytes(records.tobytes() + b"torn")
        changed |= {(part.parent.name[5:], pair) for pair in records["pair"].tolist()}
    train("other", *many, "data.cache_dir=kept", "max_steps=1")
    for key, values in references("kept").items():
        unlike = (np.frombuffer(values) != np.frombuffer(wanted[key])).reshape(-1, 2).any(1).nonzero()[0]
        assert {(key, pair) for pair in unlike.tolist()} == {each for each in changed if each[0] == key}


PARTS = np.dtype([("pair", "<i8"), ("values", "<f8", 2)])


def test_training_does_not_begin_with_a_reference_that_is_not_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    train("run")
    for path in Path("cache/references").glob("*/values"):
        values = (np.frombuffer(path.read_bytes()) + 1e-2).tobytes()
        path.write_bytes(values)
        meta = json.loads(path.with_name("meta.json").read_text())
        path.with_name("meta.json").write_text(json.dumps({**meta, "sha256": hashlib.sha256(values).hexdigest()}))
    command = ("train", "model=nano", *SMALL, *RUN, "output_dir=other")
    assert "training does not begin" in refusal(capsys, *command)
    assert not RunDir(Path("other")).checkpoint_steps()
    train("coarse", "precision=bf16", "max_steps=2", "eval_steps=2")  # of another precision, by itself
    assert logged("coarse")[1] == pytest.approx(LN_2, abs=1e-3)


def test_the_same_weights_in_another_model_have_a_reference_of_their_own() -> None:
    train("run", "max_steps=3")
    finalized("run", "other")
    train("first", "loss.reference=other", "max_steps=1")
    settings = json.loads(Path("other/config.json").read_text())
    Path("other/config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    train("second", "loss.reference=other", "max_steps=1")
    assert logged("second", "rewards/chosen")[1] != logged("first", "rewards/chosen")[1]
    assert logged("second", "logps/chosen")[1] == logged("first", "logps/chosen")[1]


def test_runs_that_compute_it_at_the_same_time_have_the_values_of_the_first() -> None:
    one, other = np.array([[-1.0, -2.0]]), np.array([[-1.0, -2.1]])
    assert _written(Cache("cache"), "key", one).tolist() == one.tolist()
    assert _written(Cache("cache"), "key", other).tolist() == one.tolist()


def test_a_resume_needs_the_reference_that_the_run_began_with(capsys: pytest.CaptureFixture[str]) -> None:
    train("whole")
    shutil.copytree("whole", "run")
    shutil.rmtree("run/checkpoints/step-00000006")
    resume = ("train", "model=nano", *SMALL, *RUN, "output_dir=run", "resume_from_checkpoint=true")
    known = references()
    shutil.rmtree("cache/references")
    said = refusal(capsys, *resume)
    assert "max_steps=1" in said
    assert "references/" in said
    train("again", "max_steps=1")
    assert references() == known
    for path in Path("cache/references").glob("*/values"):  # another one of the same size
        path.write_bytes(np.zeros(path.stat().st_size // 8).tobytes())
    assert "max_steps=1" in refusal(capsys, *resume)
    shutil.rmtree("cache/references")
    train("once more", "max_steps=1")
    assert forgather(*resume) == 0
    assert equal(weights("run"), weights("whole"))
    assert "not compare these pairs" in refusal(capsys, *resume, "max_steps=8", "loss.reference=other")
    assert forgather("eval", "run") == 0
    shutil.rmtree("cache/references")
    assert "data cache" in refusal(capsys, "eval", "run")


def test_a_checkpoint_of_orpo_has_no_reference_and_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    train("run", "loss.variant=orpo", "max_steps=3")
    assert not Path("cache/references").exists()
    resume = ("train", "model=nano", *SMALL, *RUN, "output_dir=run", "resume_from_checkpoint=true")
    assert forgather(*resume, "loss.variant=orpo") == 0
    assert "not compare these pairs" in refusal(capsys, *resume, "max_steps=8")


def test_loss_and_data_of_pairs_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert "set data=preference" in refusal(capsys, "train", "model=nano", "data=synthetic", "loss=dpo")
    assert "set loss=dpo" in refusal(capsys, "train", "model=nano", *DATA, "loss=linear_cross_entropy")
    told = refusal(capsys, "train", "model=nano", *RUN, "loss.variant=orpo", "loss.reference=base", "loss.gamma=2")
    assert "leave gamma out" in told
    assert "leave reference out" in told


def test_the_model_finalized_of_a_run_is_the_policy() -> None:
    train("run")
    finalized("run", "model")
    saved = load_file("model/model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights("run").items() if name in saved)
