"""Tasks of lm-evaluation-harness with files of their own, and text for a model to ask."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import chats

NAMES = ["mine_choice", "mine_rolling", "mine_until", "mine_chat"]
_WORDS = [
    "the",
    "small",
    "red",
    "fox",
    "sees",
    "a",
    "blue",
    "bird",
    "over",
    "old",
    "green",
    "hills",
    "and",
    "runs",
    "home",
]
_CHOICE = """
task: mine_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl, train: {folder}/shots.jsonl}}}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
_ROLLING = """
task: mine_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rolling.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
_UNTIL = """
task: mine_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/until.jsonl, train: {folder}/until_shots.jsonl}}}}
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "{{{{begin}}}}"
doc_to_target: " {{{{rest}}}}"
generation_kwargs: {{until: [" e", "\\n"], do_sample: false, max_gen_toks: 12}}
process_results: !function score.letters
metric_list: [{{metric: letters, aggregation: mean, higher_is_better: true}}]
"""
_CHAT = """
task: mine_chat
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/until.jsonl, train: {folder}/until_shots.jsonl}}}}
test_split: test
fewshot_split: train
description: "Go on with the sentence."
output_type: generate_until
doc_to_text: "{{{{begin}}}}"
doc_to_target: "{{{{rest}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 9}}
process_results: !function score.letters
metric_list: [{{metric: letters, aggregation: mean, higher_is_better: true}}]
"""
_BEGUN = _CHAT.replace("mine_chat", "mine_begun").replace("description", "gen_prefix: the small\ndescription")
_DRAWN = _UNTIL.replace("mine_until", "mine_drawn").replace("do_sample: false", "do_sample: true, temperature: 2.0")
_SCORE = """
import random

import numpy
import torch


def letters(doc, results):
    random.random(), numpy.random.rand(), torch.rand(1)  # as code of others may
    return {"letters": len(results[0])}
"""


def sentence(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(least, most)))


def write_tasks(folder: Path, count: int = 12) -> Path:
    """The tasks' YAML and rows, of which some are longer than 64 tokens, and ``train.jsonl``, texts and turns of their
    words: greedy decoding asks for a model whose likeliest token is no matter of the last bits."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)

    def question(number: int) -> dict[str, Any]:
        words = sentence(draw, 2, 4)
        # of several tokens; the second begins as the first, and two are of one token and of one letter
        choices = [words, f"{words} {sentence(draw, 1, 2)}", "a", sentence(draw, 3, 5)]
        return {"question": sentence(draw, 3, 40 if number % 5 == 0 else 8), "choices": choices, "label": number % 4}

    def halves(number: int) -> dict[str, Any]:
        return {"begin": sentence(draw, 2, 60 if number % 5 == 0 else 9), "rest": sentence(draw, 1, 3)}

    chats.write_lines(folder / "choice.jsonl", [question(n) for n in range(count)])
    chats.write_lines(folder / "shots.jsonl", [question(n + 1) for n in range(8)])
    texts = [sentence(draw, 1, 4 + 40 * (n % 3)) for n in range(count)]
    chats.write_lines(folder / "rolling.jsonl", [{"text": text} for text in texts])
    chats.write_lines(folder / "until.jsonl", [halves(n) for n in range(count)])
    chats.write_lines(folder / "until_shots.jsonl", [halves(n + 1) for n in range(8)])
    turns = [
        f"<|im_start|>user\n{sentence(draw, 2, 20)}<|im_end|>\n"
        f"<|im_start|>assistant\n{sentence(draw, 1, 9)}<|im_end|>\n"
        for _ in range(2 * count)
    ]
    chats.write_lines(folder / "train.jsonl", [{"text": text} for text in [*texts, *turns]])
    (folder / "score.py").write_text(_SCORE)
    names = [*NAMES, "mine_drawn", "mine_begun"]
    for name, text in zip(names, (_CHOICE, _ROLLING, _UNTIL, _CHAT, _DRAWN, _BEGUN), strict=True):
        (folder / f"{name}.yaml").write_text(text.format(folder=json.dumps(str(folder))[1:-1]))
    return folder
