"""``forgather eval FILE.gguf``: loss and bits per byte of a GGUF file, by llama.cpp."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import torch

from forgather_cli.config.schema import Config
from forgather_cli.data.build import load_data
from forgather_cli.data.loaders.loader import EvalLoader
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.gguf.prove import plain_token
from forgather_cli.gguf.reader import check_installed, llama_cpp, version
from forgather_cli.labels import IGNORED
from forgather_cli.terminal.bars import doing

MAX_TOKENS = 4096
"""Of an evaluation where max_eval_samples is null: llama.cpp is asked once a token."""


def evaluate_gguf(file: Path, config: Config) -> dict[str, Any]:
    """Evaluate a file on the data of ``config``, encoded by its tokenizer. Raises SetupError.

    Returns what ``evaluate_source`` does, but the accuracy.
    """
    check_installed(str(file))
    longest = llama_cpp("context_length", model=str(file))["tokens"]  # gguf 0.19 would believe what a damaged one says
    if config.data.is_paired or config.data.has_pairs:
        raise ConfigError("data: eval of a GGUF file reads plain sequences; give data=text data.files=[...]")
    with doing("reading the data"):
        data = load_data(config.data, seed=max(config.seed, 0))
    if data.eval is None or data.tokenizer is None:
        raise DataError("data.eval_fraction: the data has no evaluation split; set data.eval_files")
    sequences: list[list[int]] = []
    targets: list[list[int]] = []
    left, most = MAX_TOKENS, config.max_eval_samples
    for count, batch in enumerate(EvalLoader(data.eval, batch_size=1)):
        if count == most or (most is None and left <= 0):
            break
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        left -= len(ids)
        documents = batch.get("document_ids")
        borders = [] if documents is None else (documents[0].diff().nonzero()[:, 0] + 1).tolist()  # which see no others
        for start, stop in itertools.pairwise([0, *borders, len(ids)]):
            sequences.append(ids[start:stop].tolist())
            targets.append([*labels[start + 1 : stop].tolist(), IGNORED])
    if (most_tokens := max(map(len, sequences))) > longest:
        raise ConfigError(f"data.seq_len: the model in {file} takes {longest} tokens, got {most_tokens}; set {longest}")
    with doing("llama.cpp"):
        losses = llama_cpp(
            "losses",
            model=str(file),
            threads=torch.get_num_threads(),
            sequences=sequences,
            targets=targets,
            plain=plain_token(data.tokenizer),
            vocab=data.tokenizer.vocab_size,
        )["losses"]
    counted = [token for each in targets for token in each if token != IGNORED]
    bytes_of = getattr(data.tokenizer, "bytes_of_tokens", None)
    sizes = None if bytes_of is None else bytes_of()
    num_bytes = None if sizes is None else int(sizes[counted].sum())
    loss = math.fsum(losses) / max(len(counted), 1)
    return {
        "model": str(file),
        "read_by": version(),
        "data": data.description,
        "eval_loss": loss,
        "eval_perplexity": math.exp(min(loss, 700.0)),
        "eval_bits_per_byte": math.fsum(losses) / math.log(2) / num_bytes if num_bytes else None,
        "eval_tokens": sum(map(len, sequences)),
        "eval_targets": len(counted),
        "eval_bytes": num_bytes,
        "eval_samples": count,
    }
