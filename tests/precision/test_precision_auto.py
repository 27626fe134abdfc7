"""``precision=auto``: what it stands for on a device, who says and reads it; and what any precision contradicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from processors import pretend
from program import forgather

from forgather_cli import TrainingArguments, hardware
from forgather_cli.config.load import load_config
from forgather_cli.hardware import bf16_on
from forgather_cli.plan.run import make_plan

SMALL = ["model=nano", "data=synthetic", "seq_len=16", "num_samples=64", "num_eval_samples=4", "global_batch_size=4",
         "callbacks=minimal", "warmup_steps=1", "max_steps=1", "device=cpu"]  # fmt: skip


def test_processors_that_multiply_fast_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    has = getattr(torch.cpu, "get_capabilities", dict)()  # torch asks the processor itself
    if "avx512_bf16" in has:
        here = hardware.processor()[1]
        assert (has["avx512_bf16"], has["amx_bf16"]) == ("AVX512-BF16" in here, "AMX-BF16" in here)
    for instructions, fast in ((("AVX512", "AMX-BF16"), True), (("AVX512-BF16",), True), (("AVX2", "AVX512"), False)):
        pretend(monkeypatch, *instructions)
        assert bf16_on("cpu")[0] == fast
    assert not bf16_on("mps")[0]
    sapphire_rapids = ("AVX512", "AVX512-BF16", "AVX512-FP16")
    for instructions, fast in ((sapphire_rapids, False), ((*sapphire_rapids, "AMX-BF16"), True),
                               (sapphire_rapids[:2], True)):  # fmt: skip
        pretend(monkeypatch, *instructions, name="Intel(R) Xeon(R) Processor")
        assert bf16_on("cpu")[0] == fast
    pretend(monkeypatch, *sapphire_rapids, name="AMD EPYC")
    assert bf16_on("cpu")[0]


def test_gpus_that_multiply_fast_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    gpus = [SimpleNamespace(name="T4", major=7, minor=5), SimpleNamespace(name="A100", major=8, minor=0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert bf16_on("auto") == bf16_on("cuda") == (False, "T4, sm75; bf16 is fast from sm80")
    assert bf16_on("cuda:1") == (True, "A100, sm80")
    assert not bf16_on("cuda:2")[0]  # which there is not, as training will say
    assert not bf16_on("cpu")[0]


def test_a_run_says_and_keeps_what_auto_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    def trained(*words: str) -> tuple[str, str]:
        """(what was said of precision, type in the newest config.yaml)."""
        before = {*Path().glob("*/config*.yaml")}
        assert forgather(*words) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("precision=auto")]
        (newest,) = {*Path().glob("*/config*.yaml")} - before
        return "".join(said), yaml.safe_load(newest.read_text())["precision"]["type"]

    monkeypatch.chdir(tmp_path)
    pretend(monkeypatch, "AVX2")
    said, kind = trained("train", *SMALL, "output_dir=run")
    assert kind == "fp32"
    assert said == "precision=auto: fp32 (this processor has neither AVX512-BF16 nor AMX)"
    # from here on another machine
    pretend(monkeypatch, "AVX512-BF16")
    assert trained("resume", "run", "max_steps=2") == ("", "fp32")
    said, kind = trained("train", *SMALL, "output_dir=run", "resume_from_checkpoint=true", "max_steps=3")
    assert (said, kind) == ("precision=auto: fp32 (as the run was begun)", "fp32")
    assert trained("train", "run", "output_dir=again", "max_steps=1") == ("", "fp32")
    said, kind = trained("train", *SMALL, "output_dir=new")
    assert (said, kind) == ("precision=auto: bf16 (this processor has AVX512-BF16)", "bf16")
    assert trained("resume", "run", "max_steps=4", "precision=bf16") == ("", "bf16")
    assert forgather("train", *SMALL, "trainer=fsdp2", "param_dtype=fp32", "output_dir=refused") == 2
    assert "param_dtype: fp32 contradicts precision=bf16" in capsys.readouterr().err


@pytest.mark.parametrize(("instruction", "precision"), [("AMX-BF16", "bf16"), ("AVX512", "fp32")])
def test_plans_and_scripts_count_with_it(instruction: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, instruction)
    auto, known = (load_config(None, [*SMALL, *words]).config for words in ([], [f"precision={precision}"]))
    assert auto.precision.type == "auto"
    made = make_plan(auto)
    assert made.auto_because
    assert replace(made, auto_because="") == make_plan(known)
    assert TrainingArguments("out", precision="auto", use_cpu=True).precision.type == precision


def test_a_recipe_that_says_nothing_has_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine.\ndefaults: [train]\n")
    assert load_config("mine.yaml", [], cwd=tmp_path).config.precision.type == "auto"
