"""The proof: the result, loaded from disk as others will load it, computes what the source computes.

An encoder-decoder, which brings its own class, is loaded in a process that has the transformers library alone.

Both models compute in fp32 with the weights as they are stored, so that what is compared is the weights and not the
rounding of two implementations. One model is in memory at a time; of the source the logits of a bounded sample stay.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather_cli.bars import Bar
from forgather_cli.distributed import pick_device
from forgather_cli.errors import ModelError, ProofError
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.finalize.sample import Sample
from forgather_cli.labels import IGNORED, label_shift, shifted
from forgather_cli.loss import model_logits
from forgather_cli.models.generate import generate
from forgather_cli.precision.package import quiet
from forgather_cli.source import Located, load_located

_MAX_KEPT = 1 << 23
"""Logits of the source that are kept, fp32: 32 MiB."""
_CHUNK = 64  # tokens whose probabilities are in memory at a time


@dataclass(frozen=True)
class Measured:
    """What a model makes of a sample."""

    loss: float
    """Mean over targets, nats; over the tokens that both models know."""
    num_targets: int
    logits: tuple[Tensor, ...]
    """Of each sequence's first tokens (T, V), fp32 on the CPU, as many as were to be kept."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0)) if math.isfinite(self.loss) else self.loss


@dataclass(frozen=True)
class Reference:
    """The source on the sample, as it is and with its weights rounded to the result's dtype."""

    exact: Measured
    rounded: Measured | None
    """None where the dtype stays."""
    vocab: int
    """Tokens that source and result share."""


# ---------------------------------------------------------------------------------------------------------- measuring


def measure_source(found: Located, sample: Sample, vocab: int, rounding: torch.dtype | None) -> Reference:
    """Load the source in the dtype of its files, and let it go again."""
    source = load_located(found, dtype=None)
    exact = _measured(source.model, sample, vocab, source.device)
    rounded = None
    if rounding is not None:
        rounded = _measured(source.model, sample, vocab, source.device, rounding)
    del source
    gc.collect()
    return Reference(exact, rounded, vocab)


def _measured(
    model: nn.Module, sample: Sample, vocab: int, device: torch.device, rounding: torch.dtype | None = None
) -> Measured:
    kept: list[Tensor] = []
    room, total, count = _MAX_KEPT // vocab, 0.0, 0
    with in_fp32(model, rounding):
        for logits, loss, targets in _losses(_of_model(model, sample, device), sample, vocab):
            kept.append(logits[:room].float().cpu().clone())
            room -= len(kept[-1])
            total, count = total + loss, count + targets
    return Measured(total / max(count, 1), count, tuple(kept))


LogitsOf = Callable[[int], Tensor]
"""The logits (T, V) of a sample's sequence, by its number."""


def _of_model(model: nn.Module, sample: Sample, device: torch.device) -> LogitsOf:
    inputs = sample.inputs()

    @torch.no_grad()
    def logits(number: int) -> Tensor:
        return model_logits(model, {key: value.to(device) for key, value in inputs[number].items()})[0]

    return logits


def _losses(logits_of: LogitsOf, sample: Sample, vocab: int) -> Iterator[tuple[Tensor, float, int]]:
    """Of each sequence its logits (T, V), the sum of its loss and the number of its targets."""
    with Bar("sequences", total=len(sample.sequences)) as bar:
        for number, (inputs, (_, labels)) in enumerate(zip(sample.inputs(), sample.sequences, strict=True)):
            logits = logits_of(number)[:, :vocab]
            targets = shifted(labels, label_shift(inputs)).to(logits.device)
            loss = 0.0
            for some, wanted in zip(logits.split(_CHUNK), targets.split(_CHUNK), strict=True):  # type: ignore[no-untyped-call]
                loss += float(F.cross_entropy(some.float(), wanted, ignore_index=IGNORED, reduction="sum"))
            bar.add(1)
            yield logits, loss, int((targets != IGNORED).sum())


@contextlib.contextmanager
def in_fp32(model: nn.Module, rounding: torch.dtype | None = None) -> Iterator[None]:
    """Inside, each module computes with fp32 copies of its own weights, made when it runs and dropped when it is done.

    ``rounding``: the copies are of the weights rounded to that dtype first.
    """
    handles = []
    for module in model.modules():
        own = {name: p for name, p in module._parameters.items() if p is not None and p.is_floating_point()}
        if own and (rounding is not None or any(p.dtype != torch.float32 for p in own.values())):
            widen, restore = _swapping(own, rounding)
            handles.append(module.register_forward_pre_hook(widen))
            handles.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _swapping(own: dict[str, nn.Parameter], rounding: torch.dtype | None) -> tuple[Callable[..., None], ...]:
    """Hooks that give a module fp32 copies of its ``own`` weights, and the weights back."""

    def widen(module: nn.Module, inputs: Any) -> None:
        for name, stored in own.items():
            rounded = stored.detach() if rounding is None else stored.detach().to(rounding)
            module._parameters[name] = nn.Parameter(rounded.float(), requires_grad=False)

    def restore(module: nn.Module, inputs: Any, output: Any) -> None:
        module._parameters.update(own)

    return widen, restore


# ---------------------------------------------------------------------------------------------------------- comparing


def compare_result(directory: Path, reference: Reference, sample: Sample, options: FinalizeOptions) -> dict[str, Any]:
    """Load the result and compare it; the proof for the report. Raises ProofError beyond the bound."""
    greedy: Tensor | None = None
    with_fp32: Any = contextlib.nullcontext()
    if sample.sources:
        logits_of, greedy, through = _in_own_process(directory, sample, exact=options.quantize is None)
    else:
        model, device, through = load_result(directory)
        logits_of = _of_model(model, sample, device)
        with_fp32 = in_fp32(model) if options.quantize is None else with_fp32
        del model
    largest = 0.0  # NaN where a result is not finite and the source's was
    total, count, tokens, same, compared = 0.0, 0, 0, 0, 0
    kept = iter((reference.rounded or reference.exact).logits)
    with with_fp32:
        for logits, loss, targets in _losses(logits_of, sample, reference.vocab):
            total, count, expected = total + loss, count + targets, next(kept)
            for some, wanted in zip(logits[: len(expected)].split(_CHUNK), expected.split(_CHUNK), strict=True):  # type: ignore[no-untyped-call]
                if not len(wanted):
                    break  # nothing more was kept of the source
                actual = some.float().cpu()
                difference = float((actual - wanted).abs().max())
                largest = difference if difference > largest or math.isnan(difference) else largest
                same += int((actual.argmax(-1) == wanted.argmax(-1)).sum())
            tokens += len(expected)
            compared += expected.numel()
    del logits_of, with_fp32
    gc.collect()
    result = Measured(total / max(count, 1), count, ())
    rounded = f"the source with its weights rounded to {options.dtype}"
    proof = {
        "sample": sample.origin,
        "tokens": sample.num_tokens,
        "targets": count,
        "loaded_through": through,
        "vocabulary_compared": reference.vocab,
        "compared_with": "the source" if reference.rounded is None else rounded,
        "max_logit_difference": largest,
        "logits_compared": compared,
        "same_best_token": same / max(tokens, 1),  # share of the positions where both have the same likeliest token
        "perplexity_source": reference.exact.perplexity,
        "perplexity_result": result.perplexity,
        "perplexity_ratio": math.exp(min(result.loss - reference.exact.loss, 700.0)),
        "bound": options.bound,
        "bound_on": "max_logit_difference" if options.quantize is None else "perplexity_ratio",
    }
    _judge(proof)
    if greedy is not None and options.quantize is None:
        ours = _greedy(directory, sample)
        proof["greedy_tokens"] = greedy.shape[1]
        if not torch.equal(ours, greedy):
            raise ProofError(
                "the result is not the source's model: transformers' generate and ours write other tokens, "
                f"{greedy[0].tolist()} and {ours[0].tolist()}; nothing was written"
            )
    return proof


def _in_own_process(directory: Path, sample: Sample, *, exact: bool) -> tuple[LogitsOf, Tensor | None, str]:
    """What the transformers library alone makes of an encoder-decoder, in a process that cannot import forgather: the
    logits, and the tokens that it writes greedily to the first source. Raises ModelError."""
    if importlib.util.find_spec("transformers") is None:
        source = load_located(Located(directory, None, None), dtype=None)
        through = "Forgather's own reader, as transformers is not installed"
        return _of_model(source.model.float(), sample, source.device), None, through
    from safetensors.torch import load_file, save_file

    script = Path(__file__).with_name("plain_transformers.py")
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "inputs.safetensors"), Path(folder, "outputs.safetensors")
        inputs = [(number, key, ids) for number, sides in enumerate(sample.inputs()) for key, ids in sides.items()]
        save_file({f"{number}.{key}": ids.contiguous() for number, key, ids in inputs}, given)
        words = [
            sys.executable,
            "-I",
            str(script),
            str(directory),
            str(given),
            str(made),
            "float32" if exact else "auto",
        ]
        environment = {**os.environ, "HF_MODULES_CACHE": folder, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ModelError(f"transformers cannot load the result ({last})")
        found = load_file(made)
    version = importlib.metadata.version("transformers")
    return (lambda number: found[f"{number}.logits"][0]), found["greedy"], f"transformers {version}, in its own process"


def _greedy(directory: Path, sample: Sample) -> Tensor:
    """As many tokens by our own generation."""
    source = load_located(Located(directory, None, None), dtype=torch.float32)
    ids = sample.sources[0].to(source.device)
    begin = torch.full_like(ids[:, :1], source.tokenizer.pad_token_id)

    def logits_of(batch: dict[str, Any], *, last_only: bool, cache: Any) -> Tensor:
        return model_logits(source.model, batch, last_only=last_only, cache=cache)

    return generate(logits_of, begin, encoder_inputs={"input_ids": ids}, max_new_tokens=16, do_sample=False).cpu()


def _judge(proof: dict[str, Any]) -> None:
    on = proof["bound_on"]
    if not math.isfinite(proof["perplexity_source"]):
        raise ProofError("the source's loss is not finite, so there is nothing to keep to; finalize another checkpoint")
    if proof[on] <= proof["bound"] and math.isfinite(proof["perplexity_result"]):
        return
    # in as many digits as show that it is above the bound
    shown = (f"{proof[on]:.{n}g}" for n in range(3 if on == "max_logit_difference" else 4, 18))
    value = next((text for text in shown if not float(text) <= proof["bound"]), f"{proof[on]}")
    what = {
        "max_logit_difference": f"a logit differs by {value} from {proof['compared_with']}",
        "perplexity_ratio": f"the perplexity is {value} times the source's "
        f"({proof['perplexity_result']:.5g} for {proof['perplexity_source']:.5g})",
    }[on]
    raise ProofError(
        f"the result is not the source's model: {what} on {proof['tokens']:,} tokens ({proof['sample']}), the bound is "
        f"{proof['bound']:.15g}; nothing was written. --max-divergence X sets another bound"
    )


def load_result(directory: Path) -> tuple[nn.Module, torch.device, str]:
    """The model in ``directory`` as others will load it: (model in eval mode, its device, through what)."""
    if importlib.util.find_spec("transformers") is None:
        source = load_located(Located(directory, None, None), dtype=None)
        return source.model, source.device, "Forgather's own reader, as transformers is not installed"
    import transformers

    device = pick_device("auto")
    verbosity: Any = transformers.utils.logging
    bars = verbosity.is_progress_bar_enabled()
    verbosity.disable_progress_bar()
    try:
        with quiet():  # of torchao, which transformers imports where it is installed
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype="auto", local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
    except Exception as error:  # whatever the library raises, it does not load
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"transformers {transformers.__version__} cannot load the result ({first})") from error
    finally:
        if bars:
            verbosity.enable_progress_bar()
    return model.to(device).eval(), device, f"transformers {transformers.__version__}"
