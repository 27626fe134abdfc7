"""The proof loads what others will load: nothing of this process, no code of a stranger, no value that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finalized import logits, memorize, model_directory, refused, theirs, weights
from program import Process, forgather, nobody_runs
from tiny import decoder

from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import ProofError
from forgather_cli.finalize import prove
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.finalize.plain_transformers import in_fp32
from forgather_cli.finalize.run import finalize
from forgather_cli.inference.source import load_source
from forgather_cli.launch.processes import children

pytestmark = [
    pytest.mark.usefixtures("own_directory"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and what it imports
]

TEXT = "The river had risen in the night, and by morning the lower fields lay under water. Nobody spoke of leaving."
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 257, "eos_token_id": 256}
GEMMA = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
MAMBA = (
    "model_type: mamba2, hidden_size: 32, num_hidden_layers: 1, state_size: 8, num_heads: 4, head_dim: 16, n_groups: 1"
)
RUN = ["model=transformers", "data=synthetic", "seq_len=16", "num_samples=64", "num_eval_samples=4",
       "global_batch_size=4", "max_steps=1", "save_steps=1", "callbacks=minimal", "device=cpu",
       "output_dir=run"]  # fmt: skip


def hf_directory(model_type: str, **settings: Any) -> Any:
    """The model of transformers in ``source``, which knows ``TEXT`` by heart, and the file ``text``."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, pad_token_id=None, bos_token_id=256, **settings)
    model = memorize(transformers.AutoModelForCausalLM.from_config(config), TEXT, steps=30)
    model.save_pretrained("source")
    ByteTokenizer().save(Path("source"))
    Path("text").write_text(TEXT)
    return model.eval()


def test_a_cold_interpreter_proves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model_directory(Path("source"))
    again = finalize(Path("source"), Path("forked"), FinalizeOptions())["proof"]
    monkeypatch.setattr(prove, "subprocess", subprocess)  # instead of forks
    proof = finalize(Path("source"), Path("model"), FinalizeOptions())["proof"]
    assert "own process" in proof["loaded_through"]
    assert proof["max_logit_difference"] <= 1e-5
    assert {**again, "max_logit_difference": 0} == {**proof, "max_logit_difference": 0}


def test_what_this_process_makes_of_a_class_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    hf_directory("gemma", **GEMMA)
    monkeypatch.setattr(GemmaRMSNorm, "forward", lambda self, x: 2 * x)
    with pytest.raises(ProofError, match=r"a logit differs by .* the bound is 0.0001; nothing was written"):
        finalize(Path("source"), Path("model"), FinalizeOptions())
    assert not Path("model").exists()


@pytest.mark.parametrize("broken", ["buffer", "file"])
def test_what_breaks_on_disk_before_it_is_loaded(broken: str) -> None:
    model_directory(Path("source"))

    def break_it(line: str) -> None:
        if "loading the result" not in line:
            return
        (made,) = (path.parent for path in Path().rglob("model.safetensors") if path.parent != Path("source"))
        if broken == "buffer":  # of rotary frequencies, which follows from config.json
            config = json.loads((made / "config.json").read_text())
            config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 100.0
            (made / "config.json").write_text(json.dumps(config))
        else:
            (made / "model.safetensors").write_bytes(b"")

    with pytest.raises(Exception, match="cannot load" if broken == "file" else "a logit differs by"):
        finalize(Path("source"), Path("model"), FinalizeOptions(), break_it)
    assert [path.name for path in Path().iterdir()] == ["source"]


def test_a_block_has_fp32_copies_only_while_it_runs() -> None:
    model = decoder(vocab_size=257).bfloat16().eval()
    exact = decoder(vocab_size=257).eval()
    exact.load_state_dict(model.state_dict())
    with in_fp32(model):
        assert {p.dtype for p in model.model.layers.parameters()} == {torch.bfloat16}
        assert model.lm_head.weight.dtype == torch.float32
        assert torch.equal(logits(model), logits(exact))
        assert {p.dtype for p in model.model.layers.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_embedding_with_a_buffer_is_not_quantized(tied: bool) -> None:
    """transformers leaves Gemma's embed_scale without a value where the embedding is quantized."""
    model = hf_directory("gemma", **GEMMA, tie_word_embeddings=tied)
    report = finalize(Path("source"), Path("model"), FinalizeOptions(quantize="int8-weight-only", text=Path("text")))
    assert report["proof"]["bound_on"] == "perplexity_ratio"
    assert report["proof"]["perplexity_source"] < 20
    assert 0.9 < report["proof"]["perplexity_ratio"] < 1.05
    stored = weights(Path("model"))
    assert torch.equal(stored["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    assert any("q_proj" in name and tensor.dtype == torch.int8 for name, tensor in stored.items())
    assert ("lm_head._weight_qdata" in stored) == (not tied)
    ours = load_source(Path("model"), device="cpu").model
    torch.testing.assert_close(logits(ours), logits(theirs(Path("model"))), rtol=1e-5, atol=1e-5)


def test_an_architecture_without_a_layer_to_quantize_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    hf_directory("gpt2", n_embd=32, n_layer=1, n_head=2, n_positions=128, vocab_size=257, eos_token_id=256)
    message = refused(capsys, "source", "new", "--quantize", "int8-weight-only", "--dry-run")
    assert message.startswith("error: --quantize int8-weight-only: no linear layer of GPT2LMHeadModel can be quantized")
    assert message.endswith("leave --quantize out\n")


def test_code_of_a_stranger_is_left_out() -> None:
    source = model_directory(Path("source"))
    (source / "modeling_theirs.py").write_text("raise SystemExit('it ran')\n")
    named = {"auto_map": {"AutoModelForCausalLM": "modeling_theirs.Theirs"}, "custom_pipelines": {"x": {"impl": "x.X"}}}
    of_tokenizer = {"auto_map": {"AutoTokenizer": ["x.X", None]}}
    for name, values in (("config.json", named), ("tokenizer_config.json", of_tokenizer)):
        stored = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps({**stored, **values}))
    told: list[str] = []
    finalize(source, Path("model"), FinalizeOptions(), told.append)
    (line,) = (line for line in told if "left out" in line)
    for word in ("modeling_theirs.py", "auto_map of config.json", "custom_pipelines", "auto_map of tokenizer_con"):
        assert word in line
    assert not list(Path("model").rglob("*.py"))
    texts = [path.read_text() for path in Path("model").iterdir() if path.suffix == ".json"]
    assert not any("auto_map" in text or "custom_pipelines" in text for text in texts)


def test_special_floats_of_a_config(caplog: pytest.LogCaptureFixture) -> None:
    """Mamba2's time_step_limit ends at infinity, which transformers 5 writes as {"__float__": "Infinity"}."""
    assert forgather("train", *RUN, f"model.config={{{MAMBA}}}") == 0
    assert "__float__" in Path("run/checkpoints/step-00000001/model/config.json").read_text()
    assert "router" not in caplog.text
    assert forgather("finalize", "run", "model", "--dtype", "bf16") == 0  # its blocks ask weights for their dtype
    assert json.loads(Path("model/finalize_report.json").read_text())["proof"]["max_logit_difference"] <= 1e-4
    assert theirs(Path("model")).config.time_step_limit[1] == float("inf")


def test_a_routers_own_loss_is_left_out_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    shape = ", ".join(f"{key}: {value}" for key, value in GEMMA.items())
    experts = "num_local_experts: 2, num_experts_per_tok: 1"
    assert forgather("train", *RUN, f"model.config={{model_type: mixtral, {shape}, {experts}}}") == 0
    assert [record.levelname for record in caplog.records if "router_aux_loss_coef" in record.message] == ["WARNING"]
    caplog.clear()
    assert forgather("finalize", "run", "model") == 0
    assert "router_aux_loss_coef" not in caplog.text


KILLED = """
import subprocess
from pathlib import Path
from forgather_cli.finalize import plain_transformers, prove
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.finalize.run import finalize

script = Path(plain_transformers.__file__).read_text()
Path("slow.py").write_text(script.replace("        main(", "        import time; time.sleep(99); main("))
plain_transformers.__file__ = "slow.py"
prove.subprocess = subprocess  # instead of forks
finalize(Path("source"), Path("new"), FinalizeOptions())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_is_started_for_the_proof_ends_with_a_killed_command() -> None:
    model_directory(Path("source"))
    with Process(code=KILLED) as job:

        def scripts() -> list[int]:
            return [n for n in children(job.process.pid) if b"slow.py" in Path(f"/proc/{n}/cmdline").read_bytes()]

        job.until(scripts)
        started = scripts()
        job.process.kill()
        job.finish()
    assert nobody_runs(started, 30)
