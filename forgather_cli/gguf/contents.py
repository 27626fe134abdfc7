"""What a GGUF file of a model directory holds: origin, tokenizer and chat template as llama.cpp knows them."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import forgather_cli
from forgather_cli.checkpoint.tensors import Weights
from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError, ModelError
from forgather_cli.gguf.architecture import architecture_of
from forgather_cli.gguf.choose import find_pre_tokenizer, first_that_encodes
from forgather_cli.gguf.layout import Metadata
from forgather_cli.gguf.prove import hard_text
from forgather_cli.gguf.vocabulary import GgufVocabulary, read_vocabulary
from forgather_cli.gguf.write import Contents


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
