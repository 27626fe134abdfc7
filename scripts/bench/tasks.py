"""Requests of lm-evaluation-harness per second of processor time, beside lm-eval's own ``hf`` model.

    python scripts/bench/tasks.py [--reps 5] [--documents 32] [--hidden 256] [--layers 6] [--vocabulary 8000]

One thread, in turns, the same random Llama and tokenizer: four choices of several tokens with 3 solved examples before
them, texts of 32 tokens, and documents' perplexity. hf at the batch sizes 1 and 8: its better one counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from forgather_cli.cli.evaluate import config_to_evaluate
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.inference.evaluation import materialize, prepared
from forgather_cli.loss.build import build_loss
from forgather_cli.strategies.build import build_strategy
from forgather_cli.tasks.lm import StrategyLM

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"reps": 5, "documents": 32, "hidden": 256, "layers": 6, "vocabulary": 8000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        words = write_model(directory, args)
        ours, theirs = lm_of(directory), [hf_of(directory, size) for size in (1, 8)]
        for what, (method, requests) in asked(words, args.documents).items():
            times: list[list[float]] = [[], [], []]
            for rep in range(args.reps + 1):
                for lm, into in zip((ours, *theirs), times, strict=True):
                    seconds = cpu_seconds(partial(getattr(lm, method), requests, disable_tqdm=True))
                    if rep:  # the first warms up
                        into.append(seconds)
            medians = [len(requests) / statistics.median(each) for each in times]
            best = times[1 + medians[1:].index(max(medians[1:]))]
            ratios = [b / a for a, b in zip(times[0], best, strict=True)]
            print(json.dumps({
                "what": what, "requests": len(requests),
                "per_cpu_second": dict(zip(("ours", "hf 1", "hf 8"), (round(m, 1) for m in medians), strict=True)),
                "ratio": round(statistics.median(ratios), 2), "ratios": [round(min(ratios), 2), round(max(ratios), 2)],
            }), flush=True)  # fmt: skip


def asked(words: list[str], documents: int) -> dict[str, tuple[str, list[Any]]]:
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))

    def request(*parts: Any) -> Any:
        return SimpleNamespace(args=parts, task_name="bench")

    choices, texts = [], []
    until = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 32}
    for _ in range(documents):
        shots = "".join(f"Question: {text(8, 24)}\nAnswer: {text(3, 8)}\n\n" for _ in range(3))
        question = f"{shots}Question: {text(8, 24)}\nAnswer:"
        choices += [request(question, f" {text(3, 8)}") for _ in range(4)]
        texts.append(request(question, until))
    rolling = [request(text(50, 700)) for _ in range(documents // 2)]
    return {
        "four choices, 3 shots": ("loglikelihood", choices),
        "generation of 32 tokens": ("generate_until", texts),
        "rolling": ("loglikelihood_rolling", rolling),
    }


def write_model(directory: Path, args: argparse.Namespace) -> list[str]:
    """A Llama of random weights, with a byte-level BPE trained on the documentation; returns words of that."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=args.vocabulary, special_tokens=special))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], bos_token=special[0], pad_token=special[0]
    )
    fast.save_pretrained(str(directory))
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32, num_key_value_heads=args.hidden // 64, vocab_size=len(fast),
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=0,
    )).save_pretrained(directory)  # fmt: skip
    return [word for word in text.split() if word.isalpha()]


def lm_of(directory: Path) -> StrategyLM:
    loaded, _ = config_to_evaluate(directory, ["device=cpu"])
    config, found, group = prepared(directory, loaded.config, trust_config=False)
    tokenizer = load_tokenizer(str(directory))
    strategy = build_strategy(config, loss=build_loss(config.loss, device=torch.device("cpu")))
    materialize(strategy, found, config, tokenizer.vocab_size, 1024, group)
    strategy.parts[0].eval()
    return StrategyLM(
        strategy, tokenizer, directory, max_length=1024, max_tokens=8192, group=group, on_batch=lambda done, total: None
    )


def hf_of(directory: Path, batch_size: int) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(directory), device="cpu", batch_size=batch_size, dtype="float32")


def cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
