"""The GGUF files beside a finalized model: written, proved, and a Modelfile for Ollama."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.checkpoint.tensors import Weights
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError
from forgather_cli.finalize.sample import Sample
from forgather_cli.gguf.architecture import architecture_of
from forgather_cli.gguf.contents import contents_of, general
from forgather_cli.gguf.mixture import stored_type
from forgather_cli.gguf.modelfile import write_modelfile
from forgather_cli.gguf.options import MIXTURES, GgufType, StoredType
from forgather_cli.gguf.prove import (
    compare_contents,
    loss_in_f16,
    prove,
    prove_perplexity,
    prove_structure,
    sequences_of,
)
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
