"""Small models of transformers: their configs, runs of them under any layout, and the same training by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import parity
import torch
import torch.nn.functional as F
from finalized import theirs as load_theirs
from parity import SEQ_LEN, Layout, Result, assert_near

from forgather_cli.models.hf.build import library
from forgather_cli.run_dir import RunDir

SHAPE = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
CONFIGS = {
    "gpt2": "n_embd: 32, n_layer: 2, n_head: 4, n_positions: 32, attn_pdrop: 0.0, embd_pdrop: 0.0, resid_pdrop: 0.0",
    "gemma2": f"{SHAPE}, head_dim: 8, sliding_window: 8",
    "llama": f"{SHAPE}, max_position_embeddings: 16, tie_word_embeddings: true",
    "opt": "hidden_size: 32, ffn_dim: 48, num_hidden_layers: 2, num_attention_heads: 4, word_embed_proj_dim: 32, "
    "max_position_embeddings: 32, dropout: 0.0",
    "qwen3_moe": f"{SHAPE}, head_dim: 8, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16",
}
LEARNING_RATE, STEPS, BATCH = 0.05, 4, 4

_BASE = (
    f"data.seq_len={SEQ_LEN}", "tokenizer_default=bytes", "precision=fp32", "callbacks=minimal",
    "callbacks.progress=null", "callbacks.json=null", "callbacks.metrics=null",
    "+callbacks.probe._target_=parity.Probe", f"max_steps={STEPS}",
    "optimizer=sgd", "lr_scheduler=constant", "warmup_steps=0", f"learning_rate={LEARNING_RATE}", "weight_decay=0.0",
    "eval_steps=4", f"global_batch_size={BATCH}", "per_device_eval_batch_size=4", "max_eval_samples=7",
    "save_steps=1000",
)  # fmt: skip


def fresh(model_type: str) -> str:
    """The override for fresh weights of one of ``CONFIGS``."""
    return f"model.config={{model_type: {model_type}, {CONFIGS[model_type]}}}"


def train(
    layout: Layout, model: Sequence[str], path: Path, settings: Sequence[str] = (), *, resume: bool = False
) -> Result:
    """Train for 4 steps with plain gradient descent."""
    return parity.train(layout, (*model, *settings), path, resume=resume, base=_BASE)


def newest_model(run: Path) -> Path:
    return RunDir(run).checkpoint(RunDir(run).checkpoint_steps()[-1]) / "model"


def assert_as_by_hand(run: Result, ids: torch.Tensor, *, trains_padding: bool = False) -> None:
    """Losses, gradient norms and what is learned are those of plain PyTorch steps with the model of transformers."""
    ends = load_theirs(newest_model(run.path))
    theirs = library().AutoModelForCausalLM.from_config(ends.config).train()
    if trains_padding:
        theirs.get_input_embeddings().padding_idx = None  # of config.json: the end token
    missing, unexpected = theirs.load_state_dict(run.begin, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    losses, norms = [], []
    for batch in run.samples:
        logits = theirs(input_ids=batch).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)))
        losses.append(float(loss))
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
                    parameter.grad = None
    assert_near(run.losses, losses, "loss")
    assert_near(run.norms, norms, "gradient norm")
    torch.testing.assert_close(ends(ids).logits, theirs.eval()(ids).logits, rtol=1e-5, atol=1e-5)
