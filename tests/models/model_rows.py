"""Every option of the group ``model``: words for a small run of it, and what its module is compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from paired import UL2, WORDS, write_corpus
from program import SMALL
from safetensors.torch import save_file
from tiny import decoder, pretrained
from torch import Tensor, nn

from forgather_cli.models.modeling_qwen3_encdec import Qwen3ForSeq2SeqLM
from forgather_cli.models.pretrained import write_model_files


class ModelRow(NamedTuple):
    words: list[str]
    """Of a run whose steps take milliseconds."""
    check: Callable[[Any, dict[str, Tensor]], None]
    """Called with the module with its first weights, and a batch: a twin has its logits, or another stated property."""
    prepare: Callable[[], object] = lambda: None
    """Makes the files that the words name."""


@torch.no_grad()
def has_logits_of(load: Any, model: Any, batch: dict[str, Tensor]) -> None:
    """Those of the class of transformers that ``load`` makes of the model's directory."""
    folder = Path("twin")
    folder.mkdir()
    write_model_files(model, None, folder)
    save_file({name: each.detach() for name, each in model.named_parameters()}, folder / "model.safetensors")
    torch.testing.assert_close(model(**batch), load(folder).eval()(**batch).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def sees_no_later_token(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """For a model that nobody else has: logits change from the place of a changed token on, and not before."""
    ids = batch["input_ids"]
    other = ids.clone()
    other[:, 5] = (ids[:, 5] + 1) % 200
    changed = (model(ids) - model(other)).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [place >= 5 for place in range(ids.shape[1])]


PLAIN = [word for word in SMALL if not word.startswith("model=")]
OF_A_CLASS = partial(has_logits_of, transformers.AutoModelForCausalLM.from_pretrained)
GPT2 = (
    "model.config={model_type: gpt2, n_layer: 2, n_embd: 32, n_head: 2, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}"
)

MODELS: dict[str, ModelRow] = {
    "decoder": ModelRow([*PLAIN, "model=nano"], OF_A_CLASS),
    "qwen3_encdec": ModelRow(
        [*WORDS, *UL2], partial(has_logits_of, Qwen3ForSeq2SeqLM.from_pretrained), prepare=write_corpus
    ),
    "pretrained": ModelRow(
        [*PLAIN, "model=pretrained", "model.path=base", "data.tokenizer=bytes"],
        OF_A_CLASS,
        prepare=lambda: (Path("base").mkdir(), pretrained(Path("base"), decoder(vocab_size=257))),
    ),
    "transformers": ModelRow([*PLAIN, "model=transformers", GPT2], OF_A_CLASS),
}
"""By ``type``. One of a class that others have is held against it, any other by ``sees_no_later_token``."""
