"""The proof of a GGUF file: llama.cpp computes from it what the source computes with the weights that lie in it.

The weights' rounding is on both sides, so that what is compared is the structure: permutation, rotary settings, names,
tokenizer. What remains is the reader's own rounding: llama.cpp multiplies fp16, bf16 and Q8_0 by inputs in that type.
So does the source here. Sums in another order push an input over the border between two rounded values now and then;
in two layers that shows in a few log-probabilities, in eight all of them are rounded anew. So a file is as far from the
source as it is from the nearer of two: the source with exact inputs, and with rounded ones.

- The largest difference may be twice what rounding the inputs makes in the source (or ``BOUNDS``, if larger).
- The median difference may be 1.25 times that rounding's median (or ``TYPICAL``, if larger): a fault of the structure
  moves all log-probabilities, where one token drawn badly moves one.

Both roundings are measured in the source alone, so that no file can widen its own bound. The first is wide where a
router chooses other experts for rounded inputs; the second is not, and where it is beyond ``MOST_ROUNDING`` nothing
could be told from noise, and nothing is written.

Of files of fewer bits (``MIXTURES``) the structure is proved in fp32 too. Each tensor has to be what llama.cpp's own
quantizer makes of the source, near it, and the same for two readers; the perplexity may be ``MAX_RATIO`` times f16's.

Legend: T positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forgather_cli.checkpoint.files import remove
from forgather_cli.checkpoint.tensors import Weights, write_weights
from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError, ModelError, ProofError
from forgather_cli.finalize.plain_transformers import in_fp32
from forgather_cli.finalize.sample import BUILT_IN, MESSAGES, Sample
from forgather_cli.gguf import ggml
from forgather_cli.gguf.layout import Metadata
from forgather_cli.gguf.mixture import plain_type
from forgather_cli.gguf.options import MAX_RATIO, GgufType, StoredType
from forgather_cli.gguf.reader import llama_cpp, version
from forgather_cli.gguf.vocabulary import PHRASES, added_tokens
from forgather_cli.gguf.write import Contents, made_ahead, rounded, write_gguf
from forgather_cli.inference.source import Located, load_located
from forgather_cli.loss.model_io import model_logits

NUM_PREFIXES = 256
_LIKELY = 1e-4  # tokens that are compared have at least this probability
_BEST = 64  # or are among so many: of a large vocabulary an untrained model finds none likely
BOUNDS: dict[GgufType, float] = {"f32": 1e-3, "f16": 5e-2, "bf16": 5e-2, "q8_0": 5e-2}
"""How far a log-probability may be from the source's; more where the reader's own rounding is larger."""
TYPICAL = 2e-3
"""How far the median log-probability may be from the source's; more where the reader's own rounding is larger."""
MOST_ROUNDING = 0.2
"""By how much rounding the inputs of products may move the median log-probability: nats."""
_ROUNDING: dict[StoredType, tuple[float, float]] = {
    "f32": (0, 0), "bf16": (2**-8, 2**-134), "f16": (2**-11, 2**-25), "q8_0": (0.5 / 127 + 2**-11, 127 * 2**-25),
}  # fmt: skip
"""How far a number may be from the source's: of the largest in its block, and at least. Q8_0 rounds it to a step, and
the step, a 127th of the largest, to fp16."""
_ROOT_MEAN_SQUARE: dict[StoredType, tuple[float, float]] = {
    "q6_k": (0.13, 4096 * 2**-25), "q5_k": (0.4, 1953 * 2**-25), "q4_k": (0.4, 945 * 2**-25),
    "q5_1": (0.13, 31 * 2**-25), "q5_0": (0.18, 16 * 2**-25), "q4_0": (0.34, 8 * 2**-25),
}  # fmt: skip
"""How far numbers may be from the source's, as a share of those and at least; root mean squares. Of q5_1, q5_0 and q4_0
the worst block: one number makes the step, and all others lie between two (0.125, 0.171, 0.329). Of the others, which
search for their scales, 1.5 times the worst that searches among blocks found (q6_k 0.085, q5_k 0.262, q4_k 0.186);
blocks of normal numbers have at most 0.021, 0.042 and 0.082. At least: half of fp16's smallest number in each step of
the largest."""


@dataclass(frozen=True)
class Expected:
    """What the source says of the prefixes (T, V), log-probabilities, fp32 on the CPU."""

    exact: Tensor
    """With its own weights."""
    stored: Tensor
    """With those of the file."""
    inexact: Tensor
    """With those, and the inputs of products rounded as the reader does."""
    targets: Tensor
    """The tokens that follow, -1 for none (T,)."""


def sequences_of(sample: Sample, longest: int | None) -> list[list[int]]:
    """The sequences whose prefixes are compared; llama.cpp takes fewer tokens than the ``longest`` the model knows."""
    found, left = [], NUM_PREFIXES
    for ids, _ in sample.sequences:
        found.append(ids[0, : min(left, (longest or NUM_PREFIXES + 1) - 1)].tolist())
        left -= len(found[-1])
        if left <= 0:
            break
    return found


def expect(directory: Path, sequences: list[list[int]], kind: GgufType) -> Expected:
    """Measure the model in a directory, which is not in memory afterwards. Of an adapter the base stays as it is
    stored, and the adapter's numbers alone are rounded."""
    source = load_located(Located(directory, None, None), dtype=None, as_stored=True)
    theirs = getattr(source.model, "theirs", None)
    if theirs is not None:  # products of one expert each, whose inputs can be rounded
        theirs.set_experts_implementation("eager")
    turned = {
        m.get_parameter("weight").data_ptr() for m in source.model.modules() if type(m).__name__ == "Conv1D"
    }  # GPT-2's
    of_adapter = {p.data_ptr() for name, p in source.model.named_parameters() if "lora_" in name}

    def stored(tensor: Tensor) -> Tensor:
        if of_adapter and tensor.data_ptr() not in of_adapter:
            return tensor.float()
        if tensor.data_ptr() in turned:
            return rounded(tensor.t(), plain_type(tensor.t().shape, kind)).t().to(tensor.device)
        return rounded(tensor, plain_type(tensor.shape, kind)).to(tensor.device)

    def log_probs() -> Tensor:
        found = []
        for ids in sequences:
            batch = {"input_ids": torch.tensor([ids], device=source.device)}
            with torch.no_grad():
                found.append(model_logits(source.model, batch)[0].float().log_softmax(-1).cpu())
        return torch.cat(found)

    with in_fp32(source.model):
        exact = log_probs()
    with in_fp32(source.model, stored):
        with_stored = log_probs()
        with _as_the_reader_rounds(source.model, kind):
            inexact = log_probs()
    targets = torch.tensor([token for ids in sequences for token in (*ids[1:], -1)])
    return Expected(exact, with_stored, inexact, targets)


class _InputsRounded(TorchFunctionMode):
    """Inside, what a matrix is multiplied with is rounded to the matrix's type first, as llama.cpp does on a CPU."""

    def __init__(self, kind: GgufType) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = (self._round(args[0]), *args[1:])
        elif func is torch.addmm:  # GPT-2's Conv1D
            args = (args[0], self._round(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))

    def _round(self, inputs: Tensor) -> Tensor:
        return rounded(inputs, plain_type(inputs.shape, self._kind)).to(inputs.device)


@contextlib.contextmanager
def _as_the_reader_rounds(model: nn.Module, kind: GgufType) -> Iterator[None]:
    """Inside, products get rounded inputs, and GELU is looked up in llama.cpp's table, which is one of fp16."""

    def look_up(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return F.gelu(args[0].half().float(), approximate="tanh").half().float()

    handles = [m.register_forward_hook(look_up) for m in model.modules() if "gelu" in type(m).__name__.lower()]
    try:
        with _InputsRounded(kind):
            yield
    finally:
        for handle in handles:
            handle.remove()


def hard_text(tokens: Iterable[str]) -> list[str]:
    """What llama.cpp is to encode as the tokenizer does: code, emoji, spaces, newlines, special tokens."""
    spelled = [f"before{token} after\n{token}word {token}" for token in tokens]
    return [BUILT_IN, "".join(PHRASES), *PHRASES, *spelled]


def prove_structure(
    directory: Path, contents: Contents, tokenizer: Tokenizer, sequences: list[list[int]], stop: list[int]
) -> tuple[Metadata, dict[str, Any]]:
    """Compare the first layers of a model directory in fp32: a whole period of them, with embedding, norm and head.

    ``contents``: of a file of all layers. Returns what their file says, and the proof. Raises ProofError.
    """
    folder = directory / "first_layers"
    count, file = write_first_layers(directory, contents, tokenizer, folder)
    proof, proven = prove(file, folder, tokenizer, sequences, "f32", stop), said_by(file)
    remove(folder)
    return proven, {"layers": count, **proof}


def is_in_first(name: str, count: int) -> bool:
    """Whether a file of so many layers has this tensor."""
    block = re.match(r"blk\.(\d+)", name)
    return block is None or int(block[1]) < count


def write_first_layers(
    directory: Path, contents: Contents, tokenizer: Tokenizer, folder: Path, least: int = 0
) -> tuple[int, Path]:
    """A model directory and a file in fp32 of a whole period of a model's layers, or of ``least``. Their number."""
    config, weights = read_json_object(directory / "config.json", ModelError), Weights(directory)
    model = contents.architecture
    layers = cast("int", model.metadata[f"{model.name}.block_count"])
    count = min(max(model.period, least), layers)
    config |= {key: each[:count] for key, each in config.items() if isinstance(each, list) and len(each) == layers}
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = count
    if model.name == "gemma3":  # llama.cpp divides by something else where there are 62 layers
        config["query_pre_attn_scalar"] = model.metadata["gemma3.attention.key_length"]
    entries = model.entries(weights.names)
    names = {source for entry in entries if is_in_first(entry.name, count) for source in entry.sources}
    write_weights(folder, map(weights.spec, sorted(names)), weights)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.save(folder)
    first = replace(model, metadata={**model.metadata, f"{model.name}.block_count": count})
    file = folder / "first-layers-F32.gguf"
    write_gguf(file, replace(contents, architecture=first, weights=Weights(folder)), "f32")
    return count, file


def said_by(file: Path) -> Metadata:
    """What a file says, but for what one of some layers, or of another type, says otherwise."""
    import gguf

    fields = gguf.GGUFReader(file).fields.items()
    return {key: f.contents() for key, f in fields if not key.endswith((".block_count", ".file_type", ".tensor_count"))}


def compare_contents(file: Path, proven: Metadata, directory: Path, contents: Contents, kind: GgufType) -> None:
    """Raise ProofError for a file that does not say what is ``proven``, or has other weights than ``directory``."""
    import gguf

    found = said_by(file)
    for key in sorted(found | proven):
        if (got := found.get(key)) != (wanted := proven.get(key)):
            raise _not_the_model(file, f"its {key} is {str(got)[:60]}, in its first layers {str(wanted)[:60]}")
    source, written = replace(contents, weights=Weights(directory)), gguf.GGUFReader(file).tensors
    entries = list(source.stored(kind))
    if len(entries) != len(written):
        raise _not_the_model(file, f"it has {len(written)} tensors, not {len(entries)}")
    anew = (piece for entry, spec, stored in entries for piece in source.pieces(entry, spec, stored))
    with contextlib.closing(made_ahead(anew)) as made:
        for (entry, spec, stored), tensor in zip(entries, written, strict=True):
            raw, shape = gguf.GGMLQuantizationType[stored.upper()], tuple(reversed(tensor.shape.tolist()))
            if (tensor.name, tensor.tensor_type, shape) != (entry.name, raw, spec.shape):
                raise _not_the_model(file, f"{entry.name}, {spec.shape} in {stored}, is {tensor.name}, {shape}")
            (block, size), left = ggml.block_of(stored), tensor.data.reshape(-1).view(np.uint8)
            for piece, again in zip(source.pieces(entry, spec, "f32"), made, strict=False):
                values = piece().reshape(-1, block)
                some, left = np.split(left, [len(values) * size])
                back = gguf.quants.dequantize(some, raw).reshape(values.shape)
                apart, largest = abs(back - values), abs(back).max(1, keepdims=True)
                if stored in _ROUNDING:
                    most, least = _ROUNDING[stored]
                    is_near = (apart <= 1.001 * most * abs(values).max(1, keepdims=True) + least).all()
                else:
                    most, least = _ROOT_MEAN_SQUARE[stored]
                    bound = most * np.linalg.norm(values) + least * math.sqrt(values.size)
                    is_near = np.linalg.norm(apart) <= bound
                if not is_near:
                    raise _not_the_model(file, f"{entry.name} is up to {float(apart.max()):.3g} from the source's")
                if not np.array_equal(some, again.reshape(-1).view(np.uint8)):
                    raise _not_the_model(file, f"{entry.name} is not what the source's numbers are in {stored}")
                if block > 1:  # a build that fuses products and sums rounds once less
                    theirs = ggml.dequantize(some, stored, values.size).reshape(values.shape)
                    if not (abs(theirs - back) <= 2**-21 * largest).all():
                        raise _not_the_model(file, f"{entry.name} is another tensor to llama.cpp than to gguf")


def prove(
    file: Path, directory: Path, tokenizer: Tokenizer, sequences: list[list[int]], kind: GgufType, stop: list[int],
    max_ratio: float | None = None, lora: tuple[str, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare a file with the model directory that it was made of; the proof for the report.

    ``tokenizer``: the directory's, with the run's rule for what stands before a text. ``lora``: the file of the
    adapter that the directory has, and by how much it is scaled. Raises ProofError.
    """
    expected = expect(directory, sequences, kind)
    likely = expected.stored > math.log(_LIKELY)
    best = expected.stored.topk(min(_BEST, likely.shape[1]))
    likely.scatter_(1, best.indices, True)
    special = list(dict.fromkeys([*stop, *getattr(tokenizer, "all_special_ids", [])]))
    texts = hard_text(
        dict.fromkeys([*map(tokenizer.decode, ([n] for n in special[:8])), *added_tokens(directory)[:24]])
    )
    template = ChatTemplate.of(directory)
    made = llama_cpp(
        "measure",
        model=str(file),
        lora=lora,
        threads=torch.get_num_threads(),
        sequences=sequences,
        probabilities=min(likely.shape[1], 2 * int(likely.sum(-1).max()) + 100),
        plain=plain_token(tokenizer),
        texts=texts,
        special=special[:64],
        messages=None if template is None else MESSAGES,
    )
    found = torch.full_like(expected.stored, -math.inf)
    for row, (ids, values) in zip(found, made["likeliest"], strict=True):
        row[ids] = torch.tensor(values)
    apart, rounded_alike, own = (
        (one - other)[likely].abs()
        for one, other in (
            (found, expected.stored),
            (found, expected.inexact),
            (expected.inexact, expected.stored),
        )
    )
    largest, typical = (min(float(each(apart)), float(each(rounded_alike))) for each in (torch.max, torch.median))
    bound, typical_bound = max(BOUNDS[kind], 2 * float(own.max())), max(TYPICAL, 1.25 * float(own.median()))
    losses = [F.nll_loss(each, expected.targets, ignore_index=-1) for each in (expected.exact, expected.stored)]
    divergence = F.kl_div(expected.stored, expected.exact, reduction="batchmean", log_target=True)
    ratio = math.exp(min(float(losses[1] - losses[0]), 700.0))
    proof: dict[str, Any] = {
        "file": file.name,
        "type": kind,
        "read_by": version(),
        "prefixes": len(found),
        "log_probs_compared": int(likely.sum()),
        "max_log_prob_difference": float(apart.max()),
        "reader_rounding": float(own.max()),
        "max_difference_beside_rounding": largest,
        "bound": bound,
        "median_difference_beside_rounding": typical,
        "median_bound": typical_bound,
        "perplexity_ratio": ratio,
        "mean_kl": float(divergence),
        "texts": len(texts),
    }
    if not (noise := float(own.median())) <= MOST_ROUNDING:
        raise ProofError(
            f"--gguf {kind}: rounding the inputs of products, as llama.cpp does, moves log-probabilities of this model "
            f"by {noise:.3g} (median), so that nothing can be proved; nothing was written: choose --gguf f32"
        )
    if not largest <= bound:
        raise _not_the_model(file, f"a log-probability differs by {largest:.3g}, the bound is {bound:.3g}")
    if not typical <= typical_bound:
        raise _not_the_model(
            file, f"the log-probabilities differ by {typical:.3g} (median), the bound is {typical_bound:.3g}"
        )
    if kind == "q8_0":
        _check_ratio(file, kind, ratio, f"{ratio:.4g} times the source's perplexity", max_ratio)
    for text, ids in zip(texts, made["texts"], strict=True):
        wanted = [*tokenizer.prefix_tokens, *tokenizer.encode(text), *tokenizer.suffix_tokens]
        if ids != wanted:
            raise _not_the_model(file, f"llama.cpp encodes {text[:40]!r} as {_shown(ids, wanted)}")
    proof["stop_tokens"] = stop
    proof["stops_too_at"] = sorted(set(made["ends"]) - set(stop))
    if missing := sorted(set(stop) - set(made["ends"])):
        raise _not_the_model(file, f"llama.cpp does not stop at {tokenizer.decode(missing[:1])!r} ({missing[0]})")
    if template is not None:
        proof["chat"] = _compare_chat(file, template, tokenizer, made["chat"])
    return proof


def loss_in_f16(directory: Path, sequences: list[list[int]]) -> float:
    """Of the source with its weights rounded to fp16: nats a token, the mean."""
    expected = expect(directory, sequences, "f16")
    return float(F.nll_loss(expected.stored, expected.targets, ignore_index=-1))


def prove_perplexity(
    file: Path, contents: Contents, tokenizer: Tokenizer, sequences: list[list[int]], kind: GgufType, in_f16: float,
    max_ratio: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare what llama.cpp makes of a file with the loss of the source in f16; the proof for the report.

    Raises ProofError.
    """
    losses = llama_cpp(
        "losses",
        model=str(file),
        threads=torch.get_num_threads(),
        sequences=sequences,
        targets=[[*ids[1:], -1] for ids in sequences],
        plain=plain_token(tokenizer),
        vocab=contents.architecture.vocab_size,
    )["losses"]
    count = sum(len(ids) - 1 for ids in sequences)
    found, in_f16, ratio = (
        math.exp(min(loss, 700.0)) for loss in (sum(losses) / count, in_f16, sum(losses) / count - in_f16)
    )
    what = f"a perplexity of {found:.5g}, {ratio:.4g} times that of f16 ({in_f16:.5g})"
    bound = _check_ratio(file, kind, ratio, what, max_ratio)
    return {
        "file": file.name,
        "type": kind,
        "read_by": version(),
        "targets": count,
        "perplexity": found,
        "perplexity_f16": in_f16,
        "perplexity_ratio": ratio,
        "bound": bound,
        "stored": dict(Counter(stored for *_, stored in contents.stored(kind)).most_common()),
    }


def _check_ratio(file: Path, kind: GgufType, ratio: float, what: str, max_ratio: float | None) -> float:
    bound, types = max_ratio or MAX_RATIO[kind], list(MAX_RATIO)
    if not ratio <= bound:
        better = "f16" if kind == types[0] else types[types.index(kind) - 1]
        raise ProofError(
            f"{file.name} has {what}, and {bound:g} times is the bound; nothing was written: choose --gguf {better}, "
            "or allow more with --max-ratio"
        )
    return bound


def _compare_chat(file: Path, template: ChatTemplate, tokenizer: Tokenizer, made: dict[str, Any]) -> str:
    try:
        prompt = template.render(MESSAGES, add_generation_prompt=True)
    except DataError as error:
        return f"not compared: {error}"
    if "error" in made:
        raise _not_the_model(file, f"llama.cpp does not render the chat template ({made['error']})")
    wanted = [*tokenizer.encode_prompt(prompt), *tokenizer.suffix_tokens]
    if made["ids"] != wanted:
        raise _not_the_model(file, f"llama.cpp renders a chat as {made['prompt']!r}, the template as {prompt!r}")
    return "equal"


def plain_token(tokenizer: Tokenizer) -> int:
    """A token that is no end, and whole characters."""
    special = {*getattr(tokenizer, "all_special_ids", []), tokenizer.eos_token_id}
    numbers = (n for n in range(tokenizer.vocab_size) if n not in special)
    return next(n for n in numbers if tokenizer.decode([n]).strip().isascii() and tokenizer.decode([n]).strip())


def _shown(ids: list[int], wanted: list[int]) -> str:
    place = next((n for n, (one, other) in enumerate(zip(ids, wanted, strict=False)) if one != other), None)
    if place is None:
        return f"{len(ids)} tokens, the tokenizer as {len(wanted)}"
    return f"{ids[place : place + 4]} at token {place}, the tokenizer as {wanted[place : place + 4]}"


def _not_the_model(file: Path, what: str) -> ProofError:
    return ProofError(f"{file.name} is not the source's model: {what}; nothing was written")
