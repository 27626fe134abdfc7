"""Ollama's Modelfile (https://github.com/ollama/ollama/blob/main/docs/modelfile.md). Ollama itself is not run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError, ModelError

_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "repetition_penalty": "repeat_penalty"}  # fmt: skip
_CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]
_MARKED: dict[str, tuple[str, str, str]] = {
    "chatml": ("<|im_start|>{role}\n", "<|im_end|>\n", ""),
    "llama3": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "<|begin_of_text|>"),
    "zephyr": ("<|{role}|>\n", "</s>\n", ""),
    "phi3": ("<|{role}|>\n", "<|end|>\n", ""),
}
"""Templates by what stands before a message of a role, behind it, and before a conversation."""


def write_modelfile(directory: Path, file: str, tokenizer: Tokenizer, stop: list[int], num_ctx: int | None) -> bool:
    """Write ``Modelfile``; returns whether a chat template, where there is one, is in it."""
    lines = [f"FROM ./{file}"]
    path = directory / "generation_config.json"
    settings: dict[str, Any] = read_json_object(path, ModelError) if path.exists() else {}
    if num_ctx is not None:
        lines.append(f"PARAMETER num_ctx {num_ctx}")
    if settings.get("do_sample") is False:
        lines.append("PARAMETER temperature 0")
    for key, name in _SAMPLING.items():
        if settings.get(key) is not None and not (key == "temperature" and settings.get("do_sample") is False):
            lines.append(f"PARAMETER {name} {settings[key]}")
    lines += [f"PARAMETER stop {json.dumps(tokenizer.decode([number]), ensure_ascii=False)}" for number in stop]
    template = ChatTemplate.of(directory)
    known = None if template is None else _in_go(template)
    lines += known or []
    (directory / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return template is None or known is not None


def _in_go(template: ChatTemplate) -> list[str] | None:
    """The template in Go's language, of which Ollama's are, with the system message that it writes where a chat has
    none; None for one that is not in the table."""
    try:
        rendered, without = (template.render(_CONVERSATION[n:], add_generation_prompt=True) for n in (0, 1))
    except DataError:
        return None
    for before, behind, begin in _MARKED.values():
        start, asks = before.format(role="system"), before.format(role="assistant")
        messages = [before.format(role=m["role"]) + m["content"] + behind for m in _CONVERSATION]
        rest = "".join(messages[1:]) + asks
        # a begin token is written by the file's own rule
        given = without.removeprefix(begin).removesuffix(rest)
        system = given.removeprefix(start).removesuffix(behind)
        if rendered.removeprefix(begin) == messages[0] + rest and given in ("", start + system + behind):
            one = before.format(role="{{ .Role }}") + "{{ .Content }}" + behind
            in_go = "{{ range .Messages }}" + one + "{{ end }}" + asks
            return [f'TEMPLATE """{in_go}"""', *([f'SYSTEM """{system}"""'] if given else [])]
    return None
