"""What of a tokenizer only llama.cpp can tell: with which of its names and flags it encodes as the tokenizer does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from forgather_cli.checkpoint.tensors import Weights, write_model_directory
from forgather_cli.config.schema import DecoderSettings
from forgather_cli.data.text.library import from_document
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError
from forgather_cli.gguf.architecture import of_decoder
from forgather_cli.gguf.layout import Metadata
from forgather_cli.gguf.reader import llama_cpp
from forgather_cli.gguf.vocabulary import PHRASES, PRE_TOKENIZERS, UNMERGED, telling_document, unmerged_token
from forgather_cli.gguf.write import Contents, write_gguf
from forgather_cli.launch.processes import temporary_folder
from forgather_cli.models.decoder import Decoder


def find_pre_tokenizer(directory: Path) -> str:
    """llama.cpp's name for the splitting of a byte-level BPE in a directory. Raises DataError where it has none."""
    own = read_json_object(directory / "tokenizer.json", DataError, None)
    telling, unmerged = telling_document(own), unmerged_token(own)
    model = telling["model"]
    common: Metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": list(model["vocab"]),
        "tokenizer.ggml.token_type": [1] * len(model["vocab"]),
        "tokenizer.ggml.merges": list(map(" ".join, model["merges"])),
        "tokenizer.ggml.add_bos_token": False,
    }
    # those that take words of the vocabulary whole, where the tokenizer does
    likeliest = ("llama-bpe", "tekken") if model["ignore_merges"] else ()
    names = sorted(PRE_TOKENIZERS, key=lambda name: name not in likeliest)
    texts = [*PHRASES, *([] if unmerged is None else [UNMERGED])]
    encode = from_document(telling).encode
    wanted = [encode(text).ids for text in texts]
    most = 0
    for start in range(0, len(names), 4):  # a file each: the likeliest first
        some = names[start : start + 4]
        found, same = first_that_encodes(common, [{"tokenizer.ggml.pre": name} for name in some], texts, wanted)
        if found is not None:
            return some[found]
        most = max(most, same)
    how = f"splits {texts[most]!r}"
    if texts[most] == UNMERGED:
        how = f"{'takes' if model['ignore_merges'] else 'does not take'} {unmerged!r}, which no merges make, whole"
    raise DataError(
        f"--gguf: llama.cpp has no pre-tokenizer that {how} as tokenizer.json does; leave --gguf out, or train with "
        "tokenizer=bpe"
    )


def first_that_encodes(
    common: Metadata, candidates: Sequence[Metadata], texts: list[str], wanted: list[list[int]]
) -> tuple[int | None, int]:
    """The number of the first candidate with which llama.cpp gives texts the wanted ids, and how many texts from the
    first on get them at most. The model is a made-up one."""
    tokens = common["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    settings = DecoderSettings(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=32, vocab_size=len(tokens), max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    with temporary_folder("gguf") as folder:
        shapes = {name: parameter.shape for name, parameter in Decoder(settings).named_parameters()}
        write_model_directory(folder, {name: torch.zeros(shape) for name, shape in shapes.items()})
        model = of_decoder("llama", settings)
        files = []
        for number, candidate in enumerate(candidates):
            files.append(folder / f"{number}.gguf")
            write_gguf(files[-1], Contents(model, Weights(folder), {**common, **candidate}), "f16")
        made = llama_cpp("find", models=list(map(str, files)), texts=texts, wanted=wanted)
    return made["found"], made["same"]
