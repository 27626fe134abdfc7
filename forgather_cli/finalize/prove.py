"""The proof: the result, loaded from disk as others will load it, computes what the source computes.

It is loaded by the transformers library in a process of its own, which cannot import Forgather: memory of this one, its
classes and buffers, is not what others will have.

Both models compute in fp32 with the weights as they are stored, so that what is compared is the weights and not the
rounding of two implementations. One model is in memory at a time; of each the logits of a bounded sample stay.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.data.text.auto_tokenizer import REMEDY
from forgather_cli.data.text.piecewise import HARD
from forgather_cli.data.text.tokenizer import FileTokenizer
from forgather_cli.distributed import pick_device
from forgather_cli.errors import DataError, ModelError, ProofError
from forgather_cli.finalize import plain_transformers
from forgather_cli.finalize.options import MERGE_BOUND, FinalizeOptions
from forgather_cli.finalize.sample import BUILT_IN, MESSAGES, Sample
from forgather_cli.inference.source import Located, load_located
from forgather_cli.loss.model_io import model_logits
from forgather_cli.models.generate import generate
from forgather_cli.run_dir import is_adapter_directory
from forgather_cli.terminal.bars import Bar

_MAX_KEPT = 1 << 23
"""Logits that are kept of a model, fp32: 32 MiB."""


@dataclass(frozen=True)
class Measured:
    """What a model makes of a sample."""

    losses: list[float]
    """Of each sequence the sum over its targets, nats; over the tokens that both models know."""
    num_targets: int
    logits: Tensor
    """Of the first tokens of each sequence (T, V), fp32 on the CPU, as many as were to be kept."""
    greedy: Tensor | None = None
    """The tokens that an encoder-decoder writes to the first sequence."""

    @property
    def loss(self) -> float:
        """Mean over targets."""
        return math.fsum(self.losses) / max(self.num_targets, 1)

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


def measure_source(
    found: Located, sample: Sample, vocab: int, rounding: torch.dtype | None, *, as_stored: bool = False
) -> Reference:
    """Load the source in the dtype of its files, and let it go again. ``as_stored``: see ``load_located``."""
    source = load_located(found, dtype=None, as_stored=as_stored)
    exact = _measured(source.model, sample, vocab, source.device)
    rounded = None
    if rounding is not None:
        rounded = _measured(source.model, sample, vocab, source.device, rounding)
    del source
    gc.collect()
    torch.cuda.empty_cache()  # another process needs it now
    return Reference(exact, rounded, vocab)


def _measured(
    model: nn.Module,
    sample: Sample,
    vocab: int,
    device: torch.device,
    rounding: torch.dtype | None = None,
    *,
    exact: bool = True,
) -> Measured:
    def logits_of(**inputs: Tensor) -> Tensor:
        return model_logits(model, inputs)

    losses, kept = [], []
    in_fp32 = plain_transformers.in_fp32(model, rounding) if exact else contextlib.nullcontext()
    with in_fp32, Bar("sequences", total=len(sample.sequences)) as bar:
        for loss, logits in plain_transformers.measure(logits_of, sample.tensors(), vocab, _MAX_KEPT, device):
            losses.append(loss)
            kept.append(logits)
            bar.add(1)
    return Measured(losses, sample.num_targets, torch.cat(kept))


# ---------------------------------------------------------------------------------------------------------- comparing


def compare_result(directory: Path, reference: Reference, sample: Sample, options: FinalizeOptions) -> dict[str, Any]:
    """Load the result and compare it; the proof for the report. Raises ProofError beyond the bound."""
    exact = options.quantize is None
    needed = ["transformers", "peft"] if is_adapter_directory(directory) else ["transformers"]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        through = f"Forgather's own reader, as {missing[0]} is not installed"
        source = load_located(Located(directory, None, None), dtype=None)
        result = _measured(source.model, sample, reference.vocab, source.device, exact=exact)
        del source
    else:
        through = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in reversed(needed))
        through += ", in its own process"
        result = by_transformers(directory, sample, reference.vocab, exact=exact)
    wanted = (reference.rounded or reference.exact).logits
    # NaN where a result is not finite and the source's was
    largest = float((result.logits - wanted).abs().max())
    same = (result.logits.argmax(-1) == wanted.argmax(-1)).double().mean()
    rounded = f"the source with its weights rounded to {options.dtype}"
    proof = {
        "sample": sample.origin,
        "tokens": sample.num_tokens,
        "targets": result.num_targets,
        "loaded_through": through,
        "vocabulary_compared": reference.vocab,
        "compared_with": "the source" if reference.rounded is None else rounded,
        "max_logit_difference": largest,
        "logits_compared": wanted.numel(),
        "same_best_token": float(same),  # share of the positions where both have the same likeliest token
        "perplexity_source": reference.exact.perplexity,
        "perplexity_result": result.perplexity,
        "perplexity_ratio": math.exp(min(result.loss - reference.exact.loss, 700.0)),
        "bound": options.bound,
        "bound_on": "max_logit_difference" if exact else "perplexity_ratio",
    }
    _judge(proof)
    if result.greedy is not None and exact:
        ours = _greedy(directory, sample)
        proof["greedy_tokens"] = ours.shape[1]
        if not torch.equal(ours, result.greedy):
            raise ProofError(
                "the result is not the source's model: transformers' generate and ours write other tokens, "
                f"{result.greedy[0].tolist()} and {ours[0].tolist()}; nothing was written"
            )
    return proof


def compare_merge(
    merged: Measured, apart: Measured, stored: Measured | None, theirs: Measured | None, bound: float, *, rounds: bool
) -> dict[str, float]:
    """How far the merged model is from base and adapter apart, as they were trained: rounding to the base's dtype, once
    more than there. Of a base in four bits also how far from the adapter beside the base that is ``stored``; of what
    peft has written how far its own load of the two (``theirs``) is from ours.

    Raises ProofError beyond the bound on the first ratio of the perplexities, and of a logit beyond ``bound``: to
    peft's, and where the base's dtype does not round (``rounds``).
    """
    found = {"perplexity_ratio": math.exp(min(merged.loss - apart.loss, 700.0)), "bound": MERGE_BOUND}
    far_apart = {"max_logit_difference": ("the merged model is not base and adapter apart", merged)}
    if theirs is not None:
        far_apart["max_logit_difference_to_peft"] = ("base and adapter apart are not what peft makes of them", theirs)
    for key, (what, each) in far_apart.items():
        found[key] = float((each.logits - apart.logits).abs().max())
        if not found[key] <= bound and not (each is merged and rounds):
            raise ProofError(
                f"{what}: a logit differs by {found[key]:.3g}, the bound is {bound:g}; nothing was written. "
                "--max-divergence X sets another bound, where nothing is quantized"
            )
    if not found["perplexity_ratio"] <= MERGE_BOUND:
        raise ProofError(
            f"the merged model's perplexity is {found['perplexity_ratio']:.4g} times that of base and adapter apart, "
            f"above {MERGE_BOUND}; nothing was written: finalize the adapter as it is, or merge it into a base in fp32"
        )
    if stored is not None:
        found["perplexity_ratio_to_stored_base"] = math.exp(min(merged.loss - stored.loss, 700.0))
    return found


def by_transformers(directory: Path, sample: Sample, vocab: int, *, exact: bool, is_source: bool = False) -> Measured:
    """What the transformers library alone makes of a model directory, with peft of an adapter's.

    ``is_source``: an adapter as it was found, whose directory may have no tokenizer. Raises ModelError if it cannot
    load it, ProofError if AutoTokenizer makes other token ids than training.
    """
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "directory": str(directory),
            "given": f"{folder}/given.safetensors",
            "made": f"{folder}/made.safetensors",
            "vocab": vocab,
            "keep": _MAX_KEPT,
            "device": str(pick_device("auto")),
            "exact": exact,
            "paired": bool(sample.sources),
        }
        save_file(sample.tensors(), settings["given"])
        Path(folder, "texts.json").write_text(json.dumps([] if is_source else list(_texts(directory, sample))))
        # -P: the folder of the script, which has modules of ours, is not searched
        command = [sys.executable, "-P", plain_transformers.__file__, json.dumps(settings)]
        environment = {**os.environ, "HF_MODULES_CACHE": folder}
        with (
            open(f"{folder}/errors", "w") as errors,
            Bar("sequences", total=len(sample.sequences)) as bar,
            subprocess.Popen(  # it ends with its input, that is with this process, whatever ends that
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            ) as process,
        ):
            assert process.stdout is not None
            for _ in process.stdout:
                bar.add(1)
        said = Path(folder, "errors").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if process.returncode:
            why = said[-1] if said and process.returncode > 0 else f"exit code {process.returncode}"
            if why.startswith(plain_transformers.OTHER_IDS):
                raise ProofError(f"the result is not the source's model: {why}; nothing was written: {REMEDY}")
            raise ModelError(f"transformers cannot load and run the {'adapter' if is_source else 'result'} ({why})")
        found = load_file(settings["made"])
    losses = found["losses"].tolist()
    logits = torch.cat([found[f"{number}.logits"] for number in range(len(losses))])
    return Measured(losses, sample.num_targets, logits, found.get("greedy"))


def _texts(directory: Path, sample: Sample) -> Iterator[list[Any]]:
    """Texts and a chat, and what tokens training makes of each: see ``plain_transformers.main``."""
    tokenizer = FileTokenizer(directory)
    added = [tokenizer.decode([number]) for number in sorted(tokenizer.added_ids)]
    spelled = [f"before{token} after\n{token}word {token}" for token in added]
    texts = (*HARD, BUILT_IN, *spelled, *(tokenizer.decode(ids[0].tolist()) for ids, _ in sample.sequences))
    asked: list[tuple[Any, str]] = [(text, text) for text in texts]
    with contextlib.suppress(DataError):  # of a template that does not compile, or refuses such a conversation
        if (template := ChatTemplate.of(directory)) is not None:
            asked.append((MESSAGES, template.render(MESSAGES, add_generation_prompt=True)))
    for text, plain in asked:
        ids = tokenizer.encode(plain)
        yield [text, ids, [*tokenizer.prefix_tokens, *ids, *tokenizer.suffix_tokens], tokenizer.decode(ids)]


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
