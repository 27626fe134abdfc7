"""Chat markers: what a template writes around turns that is meant to be one token each."""

from __future__ import annotations

import re
from contextlib import suppress

from forgather_cli.data.chat.ends import ending_of
from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.errors import DataError

_BAR = "\uff5c"  # DeepSeek's, as wide as a Chinese character
_WORD = rf"[^|{_BAR}<>\s'\"{{}}%]+"  # without what expressions of a template have in such a place
_MARKER = re.compile(
    rf"<\|{_WORD}\|>|<\|{_WORD}>|<{_WORD}\|>|<{_BAR}{_WORD}{_BAR}>|<(?:start|end)_of_turn>|</?s>|<[be]os>"
)  # as ChatML, Llama 3, Gemma 4, DeepSeek, Gemma and Llama 2 have them
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TALKS = ("system", "user", "assistant"), ("user", "assistant")  # some templates refuse a system message


def markers_of(template: ChatTemplate) -> list[str]:
    """The markers that a template spells, those that it puts together (``'<|' + role + '|>'``), and what ends a turn,
    each once."""
    texts = [_COMMENT.sub("", template.source)]
    for roles in _TALKS:
        with suppress(DataError):
            texts.append(template.render([{"role": role, "content": "Hi"} for role in roles]))
    found = [marker for text in texts for marker in _MARKER.findall(text)]
    with suppress(DataError):
        end = ending_of(template)
        found += [end] if end and _TAG.fullmatch(end) else []
    return list(dict.fromkeys(found))
