"""Small conversations, a tokenizer with a chat template, and model directories as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def conversation(number: int) -> list[dict[str, str]]:
    """A system message for each third, one to three questions, and answers of different lengths."""
    system = [{"role": "system", "content": "Add the numbers."}] if number % 3 == 0 else []
    turns = []
    for turn in range(1 + number % 3):
        turns += [
            {"role": "user", "content": f"What is {number} + {turn}?\n"},
            {"role": "assistant", "content": f"It is {number + turn}.  " + "Ünïcödé 🙂 " * (number % 4)},
        ]
    return system + turns


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def write_table(path: Path, records: Sequence[Any], **options: Any) -> Path:
    """A Parquet file, whose type has every key of any record."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path, **options)
    return path


def write_chats(path: Path, count: int, first: int = 0) -> Path:
    return write_lines(path, [{"messages": conversation(number)} for number in range(first, first + count)])


def write_tokenizer(directory: Path, template: str | None, special: Sequence[str] = SPECIAL) -> Any:
    """A byte-level BPE of some 350 tokens, as transformers saves it; returns transformers' tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=350, special_tokens=list(special), initial_alphabet=alphabet)
    texts = [message["content"] for number in range(40) for message in conversation(number)]
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[-1], pad_token=special[0], chat_template=template
    )
    fast.save_pretrained(str(directory))
    return fast


def write_model(directory: Path, model_type: str, vocab_size: int, **changes: Any) -> Any:
    """A tiny random model, saved by transformers; returns it."""
    torch.manual_seed(0)
    more = {"head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.1, **changes}
    config = transformers.AutoConfig.for_model(model_type, vocab_size=vocab_size, **{**SHAPE, **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model
