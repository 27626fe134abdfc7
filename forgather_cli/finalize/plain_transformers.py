"""What a model makes of a sample; run as a script, what the transformers library alone makes of a model directory, or
with peft of an adapter's.

    python -P plain_transformers.py '{"directory": ..., "given": ..., "made": ..., ...}'     (the arguments of ``main``)

Nothing of Forgather is imported here, and in the script nothing can be. The script ends with its standard input.
Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SIDES = ("input_ids", "decoder_input_ids")
Rounding = torch.dtype | Callable[[Tensor], Tensor] | None
OTHER_IDS = "other token ids than in training, or other text of them, for"
_CHUNK = 64  # tokens whose probabilities are in memory at a time


@torch.no_grad()
def measure(
    logits_of: Callable[..., Tensor], given: dict[str, Tensor], vocab: int, keep: int, device: torch.device | str
) -> Iterator[tuple[float, Tensor]]:
    """Of each sequence its loss, a sum over targets in nats, and its first logits (T, V), fp32 on the CPU.

    ``given``: ``N.input_ids`` and ``N.targets`` of each sequence from 0 on, of an encoder-decoder
    ``N.decoder_input_ids`` too; ``vocab``: the tokens that count; ``keep``: how many logits are kept of all sequences.
    """
    room = keep // vocab
    for number in count():
        if (targets := given.get(f"{number}.targets")) is None:
            return
        sides = {key: given[name].to(device) for key in _SIDES if (name := f"{number}.{key}") in given}
        logits = logits_of(**sides)[0, :, :vocab]
        loss = 0.0
        for some, wanted in zip(logits.split(_CHUNK), targets.to(device).split(_CHUNK), strict=True):  # type: ignore[no-untyped-call]
            loss += float(F.cross_entropy(some.float(), wanted, reduction="sum"))  # -100 is no target
        kept = logits[:room].float().cpu().clone()
        room -= len(kept)
        yield loss, kept


@contextlib.contextmanager
def in_fp32(model: nn.Module, rounding: Rounding = None) -> Iterator[None]:
    """Inside, modules have fp32 copies of their weights: a block (a member of a ModuleList or ModuleDict) and an
    untied embedding while it runs, the others all the time, since some classes ask the head for its dtype (Mamba2).

    ``rounding``: the copies are of the weights rounded to that dtype first, or of what a function makes of them.
    """
    users: Counter[Tensor | None] = Counter(p for module in model.modules() for p in module._parameters.values())
    blocks = list(_blocks(model, users))
    inside = {module for block in blocks for module in block.modules()}
    handles = []
    for block in blocks:
        widen, restore = _swapping(block.modules(), rounding)
        handles.append(block.register_forward_pre_hook(widen))
        handles.append(block.register_forward_hook(restore, always_call=True))
    widen, restore = _swapping((module for module in model.modules() if module not in inside), rounding)
    widen()
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()


def _blocks(module: nn.Module, users: Counter[Tensor | None]) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.Embedding) and users[child.weight] == 1:
            yield child
        elif isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _blocks(child, users)


def _swapping(modules: Iterable[nn.Module], rounding: Rounding) -> tuple[Callable[..., None], ...]:
    """Functions, which may be hooks, that give modules fp32 copies of their weights, and the weights back."""
    slots = [(module, name, p) for module in modules for name, p in module._parameters.items() if p is not None]
    own = [(module, name, p) for module, name, p in slots if p.is_floating_point()]

    def widen(*_: Any) -> None:
        copies: dict[nn.Parameter, nn.Parameter] = {}  # of tied ones one
        for module, name, stored in own:
            if stored not in copies:
                rounded = stored.detach()
                if rounding is not None:
                    rounded = rounded.to(rounding) if isinstance(rounding, torch.dtype) else rounding(rounded)
                copies[stored] = nn.Parameter(rounded.float(), requires_grad=False)
            module._parameters[name] = copies[stored]

    def restore(*_: Any) -> None:
        for module, name, stored in own:
            module._parameters[name] = stored

    return widen, restore


def main(directory: str, given: str, made: str, vocab: int, keep: int, device: str, exact: bool, paired: bool) -> None:
    """Load ``directory`` and measure it on the safetensors file ``given``; a line is printed after each sequence.

    ``texts.json`` beside ``given`` has texts and chats, and of each the ids alone, those with what stands around them,
    and the text of the former. Where the tokenizer makes something else of one, the script ends with ``OTHER_IDS``.

    The file ``made`` gets ``losses`` and for each sequence ``N.logits``, and of an encoder-decoder (``paired``), which
    brings its class, ``greedy``: the tokens that ``generate`` writes to the first. ``exact``: compute in fp32.
    """
    sys.modules["forgather_cli"] = None  # type: ignore[assignment]
    import transformers
    from safetensors.torch import load_file, save_file

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": paired}
    if texts := json.loads(Path(given).with_name("texts.json").read_text()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **local)
    for text, *wanted in texts:
        if isinstance(text, list):
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        if [ids, tokenizer.encode(text), tokenizer.decode(wanted[0])] != wanted:
            sys.exit(f"{OTHER_IDS} {text!r:.60} by {type(tokenizer).__name__}, which AutoTokenizer takes")
    auto = transformers.AutoModelForSeq2SeqLM if paired else transformers.AutoModelForCausalLM
    adapter, how = Path(directory, "adapter_config.json"), {}
    base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.is_file() else directory
    base = str(beside) if (beside := Path(directory, base)).exists() else base  # of an adapter, and relative to it
    in_four_bits = Path(directory, "quantization_config.json")  # of the base of an adapter
    if in_four_bits.is_file():
        config = json.loads(in_four_bits.read_text(encoding="utf-8")) | {"bnb_4bit_compute_dtype": "float32"}
        how = {"quantization_config": config, "device_map": {"": device}}
    model: Any = auto.from_pretrained(base, dtype="auto", use_safetensors=True, **local, **how)
    if adapter.is_file():  # by peft: transformers itself would round the adapter to the base's dtype (5.24)
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, directory, local_files_only=True)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # on CPUs with it bitsandbytes would compute in bf16
            module.support_avx512bf16_for_cpu = False
    if not how:
        model.to(device)
    model.eval()
    sample = load_file(given)
    losses: list[float] = []
    found: dict[str, Tensor] = {}
    with in_fp32(model) if exact else contextlib.nullcontext():
        for loss, logits in measure(lambda **sides: model(**sides).logits, sample, vocab, keep, device):
            found[f"{len(losses)}.logits"] = logits
            losses.append(loss)
            print(flush=True)
        if paired:
            first = sample["0.input_ids"].to(device)
            greedy = model.generate(first, max_new_tokens=16, do_sample=False, eos_token_id=None)
            found["greedy"] = greedy.cpu().contiguous()
    save_file({**found, "losses": torch.tensor(losses, dtype=torch.float64)}, made)


def end_with_input() -> None:
    """Nothing is to be read: it ends when who asked has ended."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        main(**json.loads(sys.argv[1]))
    except Exception as error:  # whatever the library raises, it does not load
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
