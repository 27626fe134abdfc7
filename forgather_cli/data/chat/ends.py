"""Tokens that end a text: the one place that says which, for checkpoints and for finalized models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError, ModelError
from forgather_cli.targets import accepts

_ANSWER = "forgather answers"


def end_of_turn(directory: Path, tokenizer: Any) -> str | int | None:
    """Where an answer ends by the chat template of ``directory``: the id of a token, or the text that is not one token.

    ``tokenizer``: that of the directory, ours or of transformers. None without a template, or where only the text of
    the next turn tells. Raises DataError.
    """
    template = ChatTemplate.of(directory)
    end = "" if template is None else ending_of(template).strip()
    if not end:
        return None
    ids = _encoded(tokenizer, end)
    return ids[0] if len(ids) == 1 else end


def as_turns(
    directory: Path, tokenizer: Any, prompts: Sequence[str]
) -> tuple[list[str], list[list[int]], list[str]] | None:
    """Each prompt as a turn of the user, up to where the answer begins, as text and as tokens, and the texts that end
    an answer; ``tokenizer`` as above. None without a template, and with one that refuses this.
    """
    with suppress(DataError):
        if (template := ChatTemplate.of(directory)) is not None:
            turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
            texts = [template.render(turn, add_generation_prompt=True) for turn in turns]
            return texts, [_encoded(tokenizer, text) for text in texts], list(filter(None, [ending_of(template)]))
    return None


def _encoded(tokenizer: Any, text: str) -> list[int]:
    alone = {"add_special_tokens": False} if accepts(tokenizer.encode, "add_special_tokens") else {}
    return list(tokenizer.encode(text, **alone))


def ending_of(template: ChatTemplate) -> str:
    """What a template writes behind an answer, of some a line break alone; empty where only the text of the next turn
    tells. Raises DataError.
    """
    conversation = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]
    text, spans = template.render_spans(conversation)
    turn = text[slice(*spans[-1])] if spans else text
    behind = turn[turn.rfind(_ANSWER) + len(_ANSWER) :] if _ANSWER in turn else ""
    return behind.strip() or behind


def stop_tokens(directory: Path, tokenizer: Any, ending: str | int | None) -> list[int]:
    """Ids that end a text: the tokenizer's end, those the model came with, and the end of a turn."""
    known = [tokenizer.eos_token_id]
    path = directory / "generation_config.json"
    if path.exists():
        given = read_json_object(path, ModelError).get("eos_token_id")
        known += given if isinstance(given, list) else [given]
    known.append(ending if isinstance(ending, int) else None)
    return list(dict.fromkeys(token for token in known if isinstance(token, int)))


def as_eos(stop: list[int]) -> int | list[int] | None:
    """The ids as configs of transformers have them."""
    return stop[0] if len(stop) == 1 else stop or None


def write_generation_config(directory: Path, changes: dict[str, Any]) -> None:
    """Put ``changes`` into generation_config.json, beside what it has."""
    path = directory / "generation_config.json"
    generation = read_json_object(path, ModelError) if path.exists() else {}
    generation.pop("_from_model_config", None)  # it says: derived from config.json, to be made anew
    text = json.dumps({**generation, **changes}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_stop_tokens(directory: Path, tokenizer: Any) -> None:
    """Complete a model directory with its ``tokenizer``'s files: generation_config.json gets what ends a text.

    A template that refuses a plain conversation does not tell where an answer ends; ``forgather finalize`` says so.
    """
    if not hasattr(tokenizer, "encode") or not hasattr(tokenizer, "eos_token_id"):  # none, or for images and the like
        return
    ending: str | int | None = None
    with suppress(DataError):
        ending = end_of_turn(directory, tokenizer)
    if stop := stop_tokens(directory, tokenizer, ending):
        write_generation_config(directory, {"eos_token_id": as_eos(stop)})
