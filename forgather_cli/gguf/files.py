"""The GGUF files beside a finalized model: written, proved, and a Modelfile for Ollama."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forgather_cli
from forgather_cli.checkpoint.tensors import Weights
from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.data.text.tokenizer import Tokenizer, load_tokenizer
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError, ModelError
from forgather_cli.finalize.sample import Sample
from forgather_cli.gguf.architecture import architecture_of
from forgather_cli.gguf.choose import find_pre_tokenizer, first_that_encodes
from forgather_cli.gguf.layout import Metadata
from forgather_cli.gguf.mixture import stored_type
from forgather_cli.gguf.modelfile import write_modelfile
from forgather_cli.gguf.options import MIXTURES, GgufType, StoredType
from forgather_cli.gguf.prove import (
    compare_contents,
    hard_text,
    loss_in_f16,
    prove,
    prove_perplexity,
    prove_structure,
    sequences_of,
)
from forgather_cli.gguf.vocabulary import GgufVocabulary, read_vocabulary
from forgather_cli.gguf.write import Contents, write_gguf

if TYPE_CHECKING:
    from forgather_cli.adapters.directory import AdapterDirectory


def check(config: dict[str, Any], types: Sequence[GgufType], adapter: AdapterDirectory | None) -> None:
    """Raise SetupError for a model that gguf does not know, or for an adapter beside it that llama.cpp does not."""
    architecture_of(config)
    if adapter is not None:
        from forgather_cli.gguf.adapter import architecture_of_adapter

        architecture_of_adapter(adapter, types)


def size_of(
    config: dict[str, Any], weights: Weights, types: Sequence[GgufType], adapter: AdapterDirectory | None = None
) -> int:
    """Bytes of files of these types, nearly. Raises ModelError for a model that gguf does not know."""
    contents = Contents(architecture_of(config), weights, {})
    if adapter is not None:
        from forgather_cli.gguf.adapter import size_beside

        return size_beside(contents, adapter, types)
    return sum(contents.num_bytes(kind) for kind in types)


def write_and_prove(
    directory: Path, name: str, types: Sequence[GgufType], sample: Sample, stop: list[int], lineage: dict[str, Any],
    add_bos: bool | None, adapter: AdapterDirectory | None, max_ratio: float | None, say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Write the files of a finalized ``directory``, whose name will be ``name``, into it; returns their proofs.

    ``add_bos``: as ``load_tokenizer`` takes it. ``adapter``: where the directory is one. ``max_ratio``: of
    perplexities; None: the type's. Raises SetupError, ProofError.
    """
    tokenizer = load_tokenizer(str(directory), add_bos=add_bos)
    if adapter is not None:
        from forgather_cli.gguf.adapter import write_and_prove_adapter

        return write_and_prove_adapter(directory, name, types, sample, stop, lineage, tokenizer, adapter, say)
    contents = contents_of(directory, tokenizer, stop, general(name, lineage))
    longest = contents.architecture.context_length
    sequences = sequences_of(sample, longest)
    if '"NFC"' in json.dumps(read_json_object(directory / "tokenizer.json", DataError).get("normalizer")):
        say("the tokenizer composes accents (NFC), llama.cpp does not: decomposed text gets other ids there")
    say("loading the first layers in fp32 into llama.cpp and comparing")
    proven, structure = prove_structure(directory, contents, tokenizer, sequences, stop)
    if structure["stops_too_at"]:
        ids = ", ".join(f"{tokenizer.decode([n])} ({n})" for n in structure["stops_too_at"])
        say(f"llama.cpp stops at {ids} too, by the text of the token, which generation_config.json does not name")
    in_f16 = loss_in_f16(directory, sequences) if any(kind in MIXTURES for kind in types) else math.nan
    proofs = []
    for kind in types:
        file = directory / f"{name}-{kind.upper()}.gguf"
        say(f"writing {file.name}")
        if others := _others(contents, kind):
            kinds = " or ".join(sorted({*others}))
            say(f"{len(others)} tensors whose rows are no multiple of 256 are stored as {kinds}")
        write_gguf(file, contents, kind)
        say(f"loading {file.name} into llama.cpp and comparing")
        compare_contents(file, proven, directory, contents, kind)
        if kind in MIXTURES:
            proof = prove_perplexity(file, contents, tokenizer, sequences, kind, in_f16, max_ratio)
        else:
            proof = prove(file, directory, tokenizer, sequences, kind, stop, max_ratio)
        proofs.append({**proof, "structure": structure})
    first = f"{name}-{types[0].upper()}.gguf"
    if not write_modelfile(directory, first, tokenizer, stop, longest):
        say("Modelfile: no TEMPLATE, since this chat template is none of those known in Ollama's language")
    return proofs


def _others(contents: Contents, kind: GgufType) -> list[StoredType]:
    """The types of tensors that would be of another, were their rows multiples of 256."""
    return [
        stored
        for entry, spec, stored in contents.stored(kind)
        if kind in MIXTURES and stored != stored_type(contents.architecture, entry.name, (*spec.shape[:-1], 256), kind)
    ]


def contents_of(directory: Path, tokenizer: Tokenizer, stop: list[int], origin: Metadata) -> Contents:
    """What a file of a model directory holds; what of its tokenizer cannot be read is tried.

    ``tokenizer``: the directory's, with the run's rule for what stands before a text. ``stop``: what ends a text.
    Raises ModelError and DataError for what has no counterpart.
    """
    architecture = architecture_of(read_json_object(directory / "config.json", ModelError))
    vocabulary = read_vocabulary(directory, tokenizer, architecture.vocab_size, stop)
    chosen = _choose(directory, vocabulary, tokenizer)
    template = ChatTemplate.of(directory)
    chat: Metadata = {} if template is None else {"tokenizer.chat_template": _plain(template.source)}
    return Contents(architecture, Weights(directory), {**origin, **vocabulary.metadata, **chosen, **chat})


def _plain(template: str) -> str:
    """A template without ``generation`` blocks, which transformers alone has."""
    for tag, instead in (("generation", "if true"), ("endgeneration", "endif")):
        template = re.sub(rf"({{%[-+]?\s*){tag}(\s*[-+]?%}})", rf"\g<1>{instead}\g<2>", template)
    return template


def _choose(directory: Path, vocabulary: GgufVocabulary, tokenizer: Tokenizer) -> Metadata:
    if len(vocabulary.candidates) == 1:
        return vocabulary.candidates[0]
    if vocabulary.model == "gpt2":
        return {"tokenizer.ggml.pre": find_pre_tokenizer(directory)}
    texts = hard_text([])
    wanted = [tokenizer.encode(text) for text in texts]
    found, same = first_that_encodes(vocabulary.metadata, vocabulary.candidates, texts, wanted)
    if found is None:
        raise DataError(
            f"--gguf: llama.cpp does not encode {texts[same][:40]!r} as tokenizer.json does, however spaces are "
            "treated; leave --gguf out, or train with tokenizer=bpe"
        )
    return vocabulary.candidates[found]


def general(name: str, lineage: dict[str, Any]) -> Metadata:
    """What a file says of its origin."""
    source = lineage.get("made_from") or lineage
    made = f"Forgather {forgather_cli.__version__}, gguf {importlib.metadata.version('gguf')}"
    values: Metadata = {
        "general.type": "model",
        "general.name": name,
        "general.quantized_by": made,
        "general.description": f"made from {lineage['kind']} {lineage['path']}",
    }
    for key in ("run", "step", "saved", "manifest_sha256"):
        if source.get(key) is not None:
            values[f"forgather.{key}"] = str(source[key])
    return values
