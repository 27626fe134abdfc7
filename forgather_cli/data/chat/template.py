"""Chat templates: messages to text, with the semantics of transformers' ``apply_chat_template`` (5.23).

A message is a mapping with ``role``, ``content`` and whatever else its template reads. Templates come with models from
strangers, so they run in Jinja's immutable sandbox and see plain values only. Spans are in characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from forgather_cli.data.chat.sandbox import Span, TooSlow, Turns, sandbox
from forgather_cli.data.text.tokenizer import special_tokens
from forgather_cli.errors import DataError
from forgather_cli.input_files import read_json_object, read_text

Message = Mapping[str, Any]

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# what expressions of a template raise on messages that it does not expect
_RAISED = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
_SENTINEL = "\u2063assistant\u2063turn\u2063"  # invisible separators: nothing that a template would strip or split
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, the standard one first


class ChatTemplate:
    """A compiled template and the special tokens it may name (``bos_token``, ``eos_token``, ...).

    Raises DataError if the source does not compile, and from each method if the template refuses the messages.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._environment = environment = sandbox(datetime.now())
        self._given_up = ""
        self._turns: Turns = environment.extensions[Turns.identifier]  # type: ignore[assignment]
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"the chat template does not compile (line {error.lineno}: {error.message})") from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(f"the chat template does not compile ({error})") from error

    @classmethod
    def of(cls, directory: Path) -> ChatTemplate | None:
        """The template of a tokenizer directory, None if it has none. Raises DataError, with the path."""
        path = directory / "tokenizer_config.json"
        config = read_json_object(path, DataError) if path.exists() else {}
        path = directory / "chat_template.jinja"
        try:
            if path.exists():
                return cls(read_text(path, DataError), special_tokens(directory))
            source = config.get("chat_template")
            if isinstance(source, list):  # several by name
                named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
                source = named.get("default")
            return cls(source, special_tokens(directory)) if isinstance(source, str) else None
        except DataError as error:
            raise DataError(f"{directory}: {error}") from error

    @property
    def marks_turns(self) -> bool:
        """Whether ``{% generation %}`` blocks say which text is the assistant's."""
        return self._turns.found

    @property
    def shows_tools(self) -> bool:
        """Whether anything in it reads ``tools``."""
        return "tools" in meta.find_undeclared_variables(self._environment.parse(self.source))

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Sequence[Any] | None = None
    ) -> str:
        """The conversation as text; with ``add_generation_prompt`` up to where the assistant's answer begins."""
        with self._rendering():
            return self._template.render(self._variables(messages, add_generation_prompt, tools))

    def render_spans(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """The text, and the spans in it that the assistant writes: its turns up to the end-of-turn token.

        By ``{% generation %}`` blocks where the template has them; else a turn begins where the generation prompt
        ends, and ends where the rendering of the messages up to it does. Raises DataError where neither tells.
        """
        if self.marks_turns:
            blocks: list[str] = []
            with self._rendering(), self._turns.noted(blocks) as spans:
                for block in self._template.generate(self._variables(messages, False, tools)):
                    blocks.append(block)
            return "".join(blocks), spans
        text = self.render(messages, tools=tools)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        spans, end = [], 0
        for i in turns:
            start, end = _Turn(self, messages, tools, text, i).span(after=end)
            spans.append((start, end))
        return text, spans

    @contextmanager
    def _rendering(self) -> Iterator[None]:
        if self._given_up:
            raise DataError(self._given_up)  # once is enough: a conversation is rendered several times
        self._environment.begin()
        try:
            yield
        except _RAISED as error:
            what = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            message = f"the chat template refuses these messages ({what})"
            if isinstance(error, TooSlow):
                self._given_up = message
            raise DataError(message) from error

    def _variables(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Any] | None
    ) -> dict[str, Any]:
        plain: list[dict[str, Any]] = []
        for message in messages:  # without keys whose value is None, and with the reasoning under the names they read
            each = {key: value for key, value in message.items() if value is not None}
            reasoning = next((each[key] for key in _REASONING if key in each), None)
            plain.append(each if reasoning is None else {"thinking": reasoning, **each, "reasoning_content": reasoning})
        return {
            **self.special_tokens,
            "messages": plain,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }


class _Turn:
    """Where message ``index``, the assistant's, lies in the text of the whole conversation."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None, text: str, index: int
    ) -> None:
        self._template, self._messages, self._tools = template, messages, tools
        self._text, self._index = text, index

    def span(self, *, after: int) -> Span:
        start, end = self._start(), self._end()
        if start is None or end is None or not after <= start <= end:
            where = "begins" if start is None else "ends"
            raise DataError(
                f"the chat template does not tell where the assistant's turn in message {self._index + 1} {where}; "
                "put {% generation %} and {% endgeneration %} around what the assistant writes"
            )
        written = self._text[start:end].rstrip()
        content = self._messages[self._index].get("content")
        if isinstance(content, str) and content.strip() and written.endswith(content.strip()):
            return start, end  # no token ends the turn, so what stands behind the content does
        return start, start + len(written)  # without the line break behind the token

    def _start(self) -> int | None:
        """Behind the generation prompt, or where a template that has another one there puts the content."""
        prompt = self._rendered(self._messages[: self._index], add_generation_prompt=True)
        if prompt is not None and self._text.startswith(prompt):
            return len(prompt)
        around = self._around(self._messages)
        return len(around[0]) if around and self._text.startswith(around[0]) else None

    def _end(self) -> int | None:
        """Where the conversation up to this message ends. Templates that show this turn otherwise once another
        follows (Qwen3 takes its empty thoughts out) put the same text behind its content."""
        upto = self._messages[: self._index + 1]
        shown = self._rendered(upto)
        if shown is not None and self._text.startswith(shown):
            return len(shown)
        whole, alone = self._around(self._messages), self._around(upto)
        if whole is None or alone is None or not self._text.endswith(whole[1]) or not whole[1].startswith(alone[1]):
            return None
        return len(self._text) - len(whole[1]) + len(alone[1])

    def _around(self, messages: Sequence[Message]) -> tuple[str, str] | None:
        """The text before and behind this message's content."""
        other = list(messages)
        other[self._index] = {**other[self._index], "content": _SENTINEL}
        shown = self._rendered(other)
        before, found, behind = (shown or "").partition(_SENTINEL)
        return (before, behind) if found and _SENTINEL not in behind else None

    def _rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        """None where the template refuses a part of the conversation."""
        try:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt, tools=self._tools)
        except DataError:
            return None
