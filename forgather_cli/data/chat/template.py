"""Chat templates: messages to text, with the semantics of transformers' ``apply_chat_template`` (5.23).

A message is a mapping with ``role``, ``content`` and whatever else its template reads. Templates come with models from
strangers, so they run in Jinja's immutable sandbox and see plain values only. Spans are in characters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import meta, nodes

from forgather_cli.data.chat.sandbox import Span, TooSlow, Trace, Turns, sandbox, within_bound
from forgather_cli.data.text.tokenizer import special_tokens
from forgather_cli.documents.regular_files import read_json_object, read_text
from forgather_cli.errors import DataError

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
_PROBE = '\u2063"\u2063'  # which looks otherwise within JSON and within Python's repr
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, the standard one first
_REASONING_KEYS = frozenset(_REASONING)


class Joined(str):
    """As one text what a record has in parts, or as a number."""

    parts: Sequence[Any] = ()


def as_text(content: Any) -> Any:
    """A number, and parts that are all text, as one text; other content as it is."""
    if type(content) in (int, float):
        return Joined(content)
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if not texts or len(texts) < len(parts):
        return content
    joined = Joined("".join(texts))
    joined.parts = [{"type": "text", "text": text} for text in texts]
    return joined


class ChatTemplate:
    """A compiled template and the special tokens it may name (``bos_token``, ``eos_token``, ...).

    ``name`` says in messages which it is. ``now``: what it is told when it asks for the date.

    Raises DataError if the source does not compile, and from each method if the template refuses the messages.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: object = "") -> None:
        self.source, self.name = source, name
        self.special_tokens = dict(special_tokens)
        self.now = datetime.now()
        self._environment = environment = sandbox(lambda: self.now)
        self._given_up = ""
        self._takes: dict[str, tuple[bool, bool]] = {}
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
                return cls(read_text(path, DataError), special_tokens(directory), path)
            source = config.get("chat_template")
            if isinstance(source, list):  # several by name
                named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
                source = named.get("default")
            return cls(source, special_tokens(directory), directory) if isinstance(source, str) else None
        except DataError as error:
            raise DataError(f"{directory}: {error}") from error

    @property
    def marks_turns(self) -> bool:
        """Whether ``{% generation %}`` blocks say which text is the assistant's."""
        return self._turns.found

    def reads(self, key: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        """Whether the template looks at this key of a message, by name or because it writes these messages whole."""
        if key in self._names:
            return True
        others = [{name: value for name, value in message.items() if name != key} for message in messages]
        return self.render(messages, tools=tools) != self.render(others, tools=tools)

    def takes(self, role: str) -> tuple[bool, bool]:
        """Whether the template writes what a turn of this role says as text, and what it says in parts."""
        if role not in self._takes:
            self._takes[role] = True, True  # each as it is, while that is looked at
            found = [False, False]
            for number, content in enumerate((_PROBE, [{"type": "text", "text": _PROBE}])):
                talk: list[Message] = [{"role": "user", "content": "?"}, {"role": role, "content": content}]
                talk = talk[::-1] if role in ("system", "developer") else talk[role == "user" :]
                with suppress(DataError):
                    found[number] = _PROBE in self.render(talk)
            self._takes[role] = found[0], found[1]
        return self._takes[role]

    @cached_property
    def _names(self) -> set[str]:
        tree = self._environment.parse(self.source)
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        return attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}

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
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        train_on: Literal["assistant", "last", "all"] = "assistant",
        unlearned: frozenset[int] = frozenset(),
    ) -> tuple[str, list[Span]]:
        """The text, and the spans in it that are learned, by default those that the assistant writes: its turns up to
        the end-of-turn token.

        By ``{% generation %}`` blocks where the template has them and writes each where it stands; else a turn begins
        where the generation prompt ends, and ends where the next message begins. Of the messages with an index in
        ``unlearned`` nothing is learned. Raises DataError where the template does not tell.
        """
        if train_on == "all" and not unlearned:  # a quarter faster than with a look at what writes what
            text = self.render(messages, tools=tools)
            return text, [(0, len(text))]
        made = self._made(messages, tools)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if train_on == "all":
            return made.text, made.without([(0, len(made.text))], unlearned)
        if train_on == "last":
            turns = turns[-1:]
        spans, wrong = made.blocks() if self.marks_turns else ([], "")
        if wrong or not self.marks_turns:
            return made.text, made.turns([i for i in turns if i not in unlearned], wrong)
        spans = made.without(spans, unlearned.intersection(turns))
        if train_on == "last" and turns:
            begin, end = made.extent(turns[0])
            spans = [span for span in spans if begin <= span[0] < end]
        return made.text, spans

    def _made(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> _Made:
        trace, variables = Trace(), self._variables(messages, False, tools)
        with self._rendering(trace):
            for piece in within_bound(self._template.generate(variables)):
                trace.pieces.append(piece)
        return _Made(self, messages, tools, trace, variables["messages"])

    @cached_property
    def ends_of_turns(self) -> tuple[str, str] | None:
        """What stands behind an answer that another message follows, and behind the last one, without the white space
        at its end. None where it is not known."""
        messages = [{"role": role, "content": _SENTINEL} for role in ("user", "assistant", "user", "assistant")]
        try:
            made = self._made(messages, None)
            ends = [made.text[: made.extent(i)[1]].rpartition(_SENTINEL)[2].rstrip() for i in (1, 3)]
        except DataError:
            return None
        return ends[0], ends[1]

    @contextmanager
    def _rendering(self, trace: Trace | None = None) -> Iterator[None]:
        if self._given_up:
            raise DataError(self._given_up)  # once is enough: a conversation is rendered several times
        self._environment.begin(trace)
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
            if not _REASONING_KEYS.isdisjoint(each):
                reasoning = next(each[key] for key in _REASONING if key in each)
                each = {"thinking": reasoning, **each, "reasoning_content": reasoning}
            role, content = each.get("role"), each.get("content")
            takes_text, takes_parts = self.takes(role) if isinstance(role, str) else (True, False)
            if not (type(content) is str and takes_text) and isinstance(content := as_text(content), str):
                parts = getattr(content, "parts", None)
                in_parts = takes_parts and (parts or not takes_text)
                each["content"] = (parts or [{"type": "text", "text": str(content)}]) if in_parts else str(content)
            plain.append(each)
        return {
            **self.special_tokens,
            "messages": plain,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }


class _Made:
    """The text of a whole conversation, and where in it a message lies.

    ``shown``: the messages as the template has them, by whose identity loops over them are known.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        trace: Trace,
        shown: Sequence[Message],
    ) -> None:
        self._template, self._messages, self._tools = template, messages, tools
        self._trace, self._shown = trace, shown
        self.text = "".join(trace.pieces)
        self._prompts: dict[Any, tuple[str | None, bool]] = {}  # by kinds of turns, and whether the text has it there
        self._last_question = max((i for i, each in enumerate(messages) if each.get("role") == "user"), default=-1)

    def blocks(self) -> tuple[list[Span], str]:
        """The spans of generation blocks; and where the text there is not what a block made, what is wrong."""
        places, spans, last = self._places, [], 0
        for at, text in self._trace.blocks:
            start = places[at]
            end = start + len(text)
            if self.text[start:end] != text:
                return [], (
                    f": a generation block of it made {_short(text)}, and where the block stands the text is "
                    f"{_short(self.text[start:end])}"
                )
            if start < last:
                return [], ": generation blocks of it stand in one another"
            spans.append((start, end))
            last = end
        return spans, ""

    def without(self, spans: list[Span], unlearned: Iterable[int]) -> list[Span]:
        """What is left of spans, in order, without these messages."""
        elsewhere: list[tuple[int, str]] = []  # contents that are a part of another message
        for i in sorted(unlearned):
            begin, end = self.extent(i)
            content = self._messages[i].get("content")
            if isinstance(content, str) and content.strip() not in self.text[begin:end]:
                elsewhere.append((i, content.strip()))
            cut = [part for a, b in spans for part in ((a, min(b, begin)), (max(a, end), b))]
            spans = [(a, b) for a, b in cut if a < b]
        for i, content in elsewhere:  # and must not be learned there
            if any(content in self.text[a:b] for a, b in spans):
                raise self._untold(i, "begins")
        return spans

    def turns(self, wanted: Iterable[int], wrong: str) -> list[Span]:
        """What the assistant writes as these messages; ``wrong``: why generation blocks do not tell."""
        spans, made = list[Span](), {text for _, text in self._trace.blocks}
        for i in wanted:
            start, end = self._start(i), self._end(i)
            if start is None or end is None or not (spans[-1][1] if spans else 0) <= start <= end:
                if self._rendered([*self._messages[:i], *self._messages[i + 1 :]]) == self.text:
                    continue  # nothing is written for it
                raise self._untold(i, "begins" if start is None else "ends", wrong)
            end = self._end_written(i, start, end)
            if wrong and self.text[start:end] not in made:  # it may have a header
                raise self._untold(i, "begins", wrong)
            spans.append((start, end))
        return spans

    def _end_written(self, i: int, start: int, end: int) -> int:
        """Where a turn ends for the assistant: without a line break behind the token that ends it; where no token does,
        what stands behind the content does."""
        written = self.text[start:end].rstrip()
        if ends := self._template.ends_of_turns:
            mark = ends[i == len(self._messages) - 1]
            if not mark or not written:
                return end
            if written.endswith(mark):
                return start + len(written)
        content = self._messages[i].get("content")
        is_open = isinstance(content, str) and content.strip() and written.endswith(content.strip())
        return end if is_open else start + len(written)

    def extent(self, i: int) -> Span:
        """All that is written for message ``i``: header, content and what ends it. The first one begins the text."""
        begin = 0 if i == 0 else self._written[i][0] if i in self._written else self._upto(i)
        if i == 0 and 0 not in self._written and self._written:  # written before the loop over those behind
            end: int | None = min(self._written.values())[0]
        else:
            end = self._end(i)
        if begin is None or end is None or end < begin:
            raise self._untold(i, "begins" if begin is None else "ends")
        return begin, end

    def _untold(self, i: int, which: str, wrong: str = "") -> DataError:
        name = f" {self._template.name}" if self._template.name else ""
        if self._messages[i].get("role") != "assistant":
            return DataError(
                f"the chat template{name} does not tell where message {i + 1} {which}, of which nothing is to be "
                "learned; set data.train_on=assistant"
            )
        return DataError(
            f"the chat template{name} does not tell where the assistant's turn in message {i + 1} {which}{wrong}; "
            "put {% generation %} and {% endgeneration %} around what the assistant writes"
            + (", where it is written" if wrong else "")
        )

    @cached_property
    def _places(self) -> list[int]:
        """Characters before each piece of the text."""
        return list(itertools.accumulate(map(len, self._trace.pieces), initial=0))

    @cached_property
    def _written(self) -> dict[int, Span]:
        """What a loop over the messages writes while it is at each of them, where that is one stretch of text, and they
        follow one another."""
        numbers = {id(message): i for i, message in enumerate(self._shown)}
        now: dict[int, tuple[int, int]] = {}  # of each loop the step that goes on: its item, its place
        found: dict[int, list[Span]] = {}
        for loop, place, item in self._trace.steps:
            last, since = now.get(loop, (item, place))
            if last in numbers and self._places[since] < self._places[place]:
                found.setdefault(numbers[last], []).append((self._places[since], self._places[place]))
            now[loop] = item, place
        written = {i: found[i][0] for i in sorted(found) if len(found[i]) == 1}
        return written if sorted(written.values()) == [*written.values()] else {}

    def _upto(self, count: int) -> int | None:
        """Where the text of the first messages ends, if the whole one begins with it."""
        shown = self._rendered(self._messages[:count]) if count else ""
        return len(shown) if shown is not None and self.text.startswith(shown) else None

    def _start(self, i: int) -> int | None:
        """Behind the generation prompt, or where a template that has another one there puts the content.

        Turns of one kind follow the same prompt, so that a few renderings tell it of a thousand.
        """
        begin, end = self._written.get(i, (0, len(self.text)))
        written, before, message = self.text[begin:end], self._messages[:i], self._messages[i]
        kind: Any = None  # renderings of other prefixes tell nothing of this one
        if i in self._written:
            last, is_last = before[-1] if before else {}, i == len(self._messages) - 1
            kind = last.get("role"), *last, *message, bool(message.get("content")), i > self._last_question, is_last
        if kind is None or kind not in self._prompts:
            prompt = self._rendered(before, add_generation_prompt=True)
            is_here = prompt is not None and self.text.startswith(prompt) and begin <= len(prompt) <= end
            shown = self.text[:begin] if is_here else None if kind is None else self._rendered(before)
            header = None if prompt is None or shown is None else prompt[len(_shared(prompt, shown)) :]
            self._prompts[kind] = header, is_here
        header, is_here = self._prompts[kind]
        if header == "":
            return begin if is_here else end - len(written.lstrip())
        # earlier messages are shown otherwise, but the prompt ends with what begins this one, or with more than that:
        # <think>, which is taken out of turns that are not the last
        given = _shared(header or "", written)
        if given and (given == header or len(given) <= written.rfind(str(message.get("content") or "").strip())):
            return begin + len(given)
        around = self._around(self._messages, i)
        content = len(around[0]) if around and self.text.startswith(around[0]) else None
        return content if not given else begin + len(given) if content is None else min(begin + len(given), content)

    def _end(self, i: int) -> int | None:
        """Where the next message begins. Templates that show this turn otherwise once another follows (Qwen3 takes its
        empty thoughts out) put the same text behind its content."""
        upto = self._messages[: i + 1]
        if len(upto) == len(self._messages):
            return len(self.text)
        if i in self._written and i + 1 in self._written:  # else the next may be written where the loop is at this one
            return self._written[i][1]
        if (end := self._upto(i + 1)) is not None:
            return end
        whole, alone = self._around(self._messages, i), self._around(upto, i)
        if whole is None or alone is None or not self.text.endswith(whole[1]) or not whole[1].startswith(alone[1]):
            return None
        return len(self.text) - len(whole[1]) + len(alone[1])

    def _around(self, messages: Sequence[Message], i: int) -> tuple[str, str] | None:
        """The text before and behind the content of message ``i``."""
        other = list(messages)
        other[i] = {**other[i], "content": _SENTINEL}
        shown = self._rendered(other)
        before, found, behind = (shown or "").partition(_SENTINEL)
        return (before, behind) if found and _SENTINEL not in behind else None

    def _rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        """None where the template refuses a part of the conversation."""
        try:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt, tools=self._tools)
        except DataError:
            return None


def _shared(one: str, other: str) -> str:
    """What both begin with, whole tokens."""
    found: str = commonprefix([one, other])  # noqa: RUF071 - of characters
    if found not in (one, other) and found.rfind("<") > found.rfind(">"):
        found = found[: found.rfind("<")]
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
