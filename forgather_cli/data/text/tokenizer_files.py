"""The files of a Hugging Face tokenizer directory: read for what the tokenizer's own file does not say, and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.errors import DataError
from forgather_cli.input_files import read_json_object

if TYPE_CHECKING:
    import tokenizers

END = "<|endoftext|>"


def special_tokens(directory: Path) -> dict[str, str | int | None]:
    """Tokens (text or id) for eos, bos and pad, from the tokenizer's files, else the model's."""
    named = [_read_json(directory / name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    by_id = [_read_json(directory / name) for name in ("config.json", "generation_config.json")]
    found: dict[str, str | int | None] = {}
    for kind in ("eos", "bos", "pad"):
        tokens = [_content(settings.get(f"{kind}_token")) for settings in named]
        tokens += [_first(settings.get(f"{kind}_token_id")) for settings in by_id]
        found[kind] = next((token for token in tokens if token is not None), None)
    return found


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, lambda why: DataError(f"data.tokenizer: {why}")) if path.exists() else {}


def _content(token: Any) -> str | int | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _first(ids: Any) -> str | int | None:
    ids = ids[0] if isinstance(ids, list) and ids else ids
    return ids if isinstance(ids, int) else None


def write_tokenizer(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` of a tokenizer whose only special token is the end."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_config(directory, {"eos_token": END, "bos_token": END, "pad_token": END})


def write_config(directory: Path, special: dict[str, Any]) -> None:
    """``tokenizer_config.json`` with these special tokens."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_template(source: str | None, directory: Path) -> None:
    """The chat template, if there is one."""
    if source is not None:
        (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
