"""Data that are refused: what is given, and what is said of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chats import write_lines, write_tokenizer
from paired import mixture
from refusals import case, cases, table
from test_chat import TALK
from test_loader import Count, Numbers, StatefulCount, at, loader
from test_masks import FAMILIES, HEADED, TALKS, TOKENS, assistant, blocks, made, user
from test_records import HI, YO, load

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import (
    DataTarget,
    InstructSettings,
    Seq2SeqSettings,
    TextSettings,
    TokensSettings,
    Ul2Settings,
)
from forgather_cli.data.build import load_data
from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.data.paired.denoise import row_lengths
from forgather_cli.data.text.corpus import find_corpus
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import ConfigError, DataError

SHUFFLED = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content | upper }}{% endfor %}"
BACKWARDS = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }};{% endfor %}"
TEMPLATES = {
    "{% for m in messages %}": r"does not compile \(line 1: Unexpected end of template",
    "a\n{% generation %}{% if %}": r"does not compile \(line 2: ",
    "{{ raise_exception('no system') }}": r"refuses these messages \(no system\)",
    "{{ messages[0].content + 1 }}": r"refuses these messages \(TypeError: ",
    "{{ messages[9].content }}": r"refuses these messages \(.*has no element 9\)",
    "{{ 1 / 0 }}": r"refuses these messages \(ZeroDivisionError",
    "{{ messages.append(1) }}": r"refuses these messages \(access to attribute .append. .* is unsafe",
    "{{ ''.__class__.__mro__ }}": r"refuses these messages \(.*unsafe",
    "{{ namespace(__x=1) }}": r"refuses these messages \(a namespace holds no",
    "{{ dict.__subclasses__() }}": r"refuses these messages \(.*no attribute '__subclasses__'",
}
RECORDS: list[tuple[Any, dict[str, Any], str]] = [
    ({"instruction": "Hi", "output": "Yo", "history": [["Hi"]]}, {}, "'history'"),
    ({"instruction": "Hi", "output": "Yo", "history": [HI, YO]}, {}, "'history'"),
    ({"text": ""}, {}, "'text' is empty"),
    ({"text": 5}, {}, "data.mapping"),
    ({"prompt": [HI, YO], "completion": [user("More")]}, {}, "no turn of the assistant"),
    ({"prompt": [], "completion": []}, {}, "no turn of the assistant"),
    ({"messages": [HI, {**YO, "tool_calls": "move"}]}, {}, "'tool_calls' of message 2"),
    ({"messages": [HI, YO], "tools": ["move"]}, {}, "'tools'"),
    ({"conversations": [{"from": "function_call", "value": "move"}]}, {}, "the call in message 1 is not JSON"),
    ({"q": [HI], "p": "Hi", "a": "Yo"}, {"mapping": {"q": "user", "p": "user", "a": "assistant"}}, "'q' and 'p'"),
    ({"q": "Hi", "text": "Yo"}, {"mapping": {"q": "user", "a": "assistant"}}, "its keys: q, text"),
    ({"messages": [HI]}, {}, "set data.train_on=all"),
    ({"messages": []}, {}, "'messages' must be a list of messages, got an empty list"),
    ({"messages": "Hi"}, {}, "'messages' must be a list of messages, got str"),
    ({"line": "Hi"}, {}, "(its keys: line); set data.messages_key"),
    ({"messages": [{**HI, "role": "bot"}]}, {}, "message 1 has the unknown role 'bot'; roles are system,"),
    ({"messages": [HI, {"content": "Yo"}]}, {}, "message 2 has no role (its keys: content)"),
    ({"messages": [HI, "Yo"]}, {}, "message 2 is str, not an object with role and content"),
    ({"messages": [HI, {"role": "assistant"}]}, {}, "message 2 must have text as content, got none"),
    ({"messages": [{**HI, "content": [1]}, YO]}, {}, "message 1 must have text as content, got list"),
    ({"prompt": 1, "completion": "Yo"}, {}, "'prompt' is int, not text or a list of messages"),
    ({"messages": [HI, YO], "tools": "{"}, {}, "'tools' is not JSON"),
]


def template(source: str) -> None:
    ChatTemplate(source, {}).render(TALK)


def spans(source: str, talk: Any = TALK, **more: Any) -> None:
    ChatTemplate(source, TOKENS).render_spans(talk, **more)


def text(name: str, content: bytes, **settings: Any) -> None:
    Path(name).write_bytes(content)
    load_data(TextSettings(files=[name], **{"cache_dir": "cache", "seq_len": 32, **settings}), seed=1)


def tokens(name: str, values: Any, dtype: str = "uint16", **settings: Any) -> None:
    if not isinstance(values, bytes):
        np.array(values, dtype).tofile(name) if name.endswith(".bin") else np.save(name, values)
    else:
        Path(name).write_bytes(values)
    load_data(TokensSettings(files=[name], **{"cache_dir": "cache", "seq_len": 8, **settings}), seed=1)


def pair(record: str) -> None:
    Path("pairs.jsonl").write_text(f'{{"input": "a", "target": "b"}}\n{record}\n')
    load_data(Seq2SeqSettings(files=["pairs.jsonl"], cache_dir="cache"), seed=0, num_sentinels=2)


def record(second: Any, settings: dict[str, Any]) -> None:
    load(write_lines(Path.cwd() / "records.jsonl", [{"messages": [HI, YO], "q": "Hi", "a": "Yo"}, second]), **settings)


def chats(name: str, content: str, tokenizer: str = "directory", **settings: Any) -> None:
    write_tokenizer(Path("directory"), CHATML)
    Path(name).write_text(content or json.dumps({"messages": [HI, YO]}))
    load_data(InstructSettings(files=[name], tokenizer=tokenizer, cache_dir="cache", **settings), seed=0)


def other_workers() -> None:
    first = loader(StatefulCount(1000), 4, 2)
    next(iter(first))
    next(iter(at(first.state_dict(), loader(StatefulCount(1000), 4, 2, num_workers=2))))


def own(kind: str, **settings: Any) -> None:
    load_data(DataTarget(path="test_dispatch.own", kwargs={"kind": kind}, **settings), seed=1)


FINE = b'{"text": "fine"}\n'
GIVE = r"; give a text in UTF-8, or give jsonl, json, parquet, csv"
test_what_is_refused = table(
    # templates
    *cases(DataError, template, *((source, f"^the chat template {told}") for source, told in TEMPLATES.items())),
    case(DataError, r"where the assistant's turn in message 2 begins; put {% generation %}", spans, SHUFFLED),
    case(DataError, "the assistant's turn in message 4 ends;", spans, BACKWARDS),
    case(DataError, "where message 1 ends, of which", spans, SHUFFLED, train_on="all", unlearned=frozenset([0])),
    case(DataError, "turn in message 4 begins;", spans, SHUFFLED, train_on="all", unlearned=frozenset([3])),
    case(DataError, "where message 1 begins, of which nothing is to be learned",
         spans, FAMILIES["gemma"], TALKS["system"], train_on="all", unlearned=frozenset([0])),
    case(DataError, r"(?s)/.+/template\.jinja(?=.*message 2)(?=.*'b<e>')(?=.*'<S>A').*data\.chat_template",
         lambda: made(Path.cwd(), [user("a"), assistant("b")],
                      blocks("{% filter upper %}" + HEADED + "{% endfilter %}{{ '\n' }}"))),
    # texts, as files and as tables
    *cases(DataError, text,
        ("a.txt", b"", r"no text in 1 files \(.*a\.txt\); they are empty"),
        ("a.txt", b"\0" + b"x" * 100, r"a\.txt: is not text \(byte 0 is NUL\)" + GIVE),
        ("a.txt", b"x" * 100_000 + b"\0" + b"x" * 100, r"a\.txt: is not text \(byte 100000 is NUL\)" + GIVE),
        ("a.jsonl", FINE + b'{"text": "cut', r"a\.jsonl:2: not a JSON line"),
        ("a.jsonl", FINE + b'{"body": 1, "id": 1}', r"a.jsonl:2: no key 'text' \(its keys: body, id\); set data.text_"),
        ("a.jsonl", FINE + b'{"text": 3}', r"a\.jsonl:2: 'text' is int, not text"),
        ("a.jsonl", b'{"text": "x\\ud800y"}\n', r"a\.jsonl:1: .*surrogate.*; .* data\.on_bad_row=skip"),
        ("a.json", b'[{"text": "x\\ud800y"}, {"text": "z"}]', r"a\.json:1: .*surrogate.*; .* data\.on_bad_row=skip"),
        ("a.json", b'[{"text": "one"},', r"a\.json(.|\n)* not JSON"),
        ("a.json", b'{\n"text": "one"}', r"a\.json(.|\n)* not a JSON line"),
        ("a.json", b'[{"text": "one"}, 3]', r"a\.json:2: expected a JSON object, got int"),
        ("a.parquet", b"nothing", r"a\.parquet: cannot be read"),
        ("a.csv", b"a,b\n1,2\n", r":2: no key 'text' \(its keys: a, b\); set data\.text_key"),
        ("a.csv", b"text;b\n1;2\n", r":2: no key 'text' \(its keys: text;b\); set data\.text_key"),
        ("a.csv", b"text,b\n1,2\n\n3,4,5\n", r":4: has 3 cells, and the header 2 \(text, b\); .* data.on_bad_row=skip"),
        ("a.csv", b'text,b\n"1\n\n2",2\n3\n', r":5: has 1 cells, and the header 2"),
        ("a.csv", b"text,text\n1,2\n", r": two columns have one name \(text, text\); rename one"),
        ("a.csv", b'text,b\n1,2\n"3,4\n5,6\n', r":3: its quotes are not closed or not doubled"),
        ("a.csv", b'text,b\n1,2\n"3" x,4\n5,6\n', r"csv:3: its quotes are not closed or not doubled"),
        ("a.csv", b"text,b\n1,\x00\n", r": is not text .* UTF-8"),
        ("a.csv", b"", r"data\.files: no text in 1 files"),
        ("a.csv", b"text,b\n", r"^data\.files: no text in 1 files"),
    ),
    *(case(DataError, rf"{re.escape(name)}: is text in {encoding.upper()[:6]}.*iconv -f",
           text, name, ('{"text": "some words"}\n' * 9).encode(encoding))
      for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32") for name in ("a.txt", "a.jsonl", "a.json")),
    case(DataError, r"data\.eval_fraction: 1\.0 leaves nothing to train on",
         text, "a.txt", b"long enough " * 20, eval_fraction=1.0),
    case(DataError, r"data\.cache_dir: cannot write the data cache \(.*; set data\.cache_dir to",
         text, "a.txt", b"long enough " * 20, cache_dir="a.txt/cache"),
    case(DataError, r"data\.files: no file matches '.*\.txt' \(looked in ", find_corpus, TextSettings(files=["*.txt"])),
    case(DataError, r"data\.eval_files: no file matches", text, "a.txt", b"x", eval_files=["none"]),
    case(DataError, r"is a directory; write .*\*\*/\*\.txt", find_corpus, TextSettings(files=["."])),
    # tokens and tokenizers
    *cases(DataError, tokens,
        ("a.bin", [1, 257], r"token id 257 is outside the vocabulary of data\.tokenizer \(257 ids\)"),
        ("a.bin", [], "no tokens in 1 files"),
        ("a.bin", [1] * 9, "uint8", r"9 bytes are no multiple of 2; set data\.token_dtype"),
        ("a.txt", b"x", "are .bin or .npy"),
        ("a.npy", b"none", "cannot be read"),
        ("a.npy", np.zeros(10), "integers, got float64"),
        ("a.npy", np.ones((3, 4), np.int32, "F"), "C-ordered array of integers"),
    ),
    case(DataError, "token id -1 is outside the vocabulary", tokens, "a.bin", [1, -1], "int32", token_dtype="int32"),
    case(DataError, r"data\.packing=pad: .* data\.document_separator .*token is 256",
         tokens, "a.bin", [1] * 50, packing="pad"),
    case(DataError, r"data\.isolate_documents=true: nothing marks the documents",
         tokens, "a.bin", [1] * 50, isolate_documents=True),
    case(DataError, r"data\.seq_len: 8 is longer than the training split of 5 tokens",
         tokens, "a.bin", [1] * 5, eval_fraction=0.0),
    case(DataError, "leaves nothing to train on", tokens, "a.bin", [1], eval_fraction=0.5),
    case(DataError, "bpe is trained on text", tokens, "a.bin", [1] * 9, tokenizer="bpe"),
    case(DataError, r"data\.tokenizer.*tokenizer\.json", load_tokenizer, "."),
    case(DataError, r"^data\.tokenizer.*tokenizer\.json",
         lambda: Path("tokenizer.json").write_text("not json") and load_tokenizer(".")),
    # records of chats and pairs
    *cases(DataError, record, *((*given, rf"records\.jsonl:2: .*{re.escape(told)}") for *given, told in RECORDS)),
    *cases(DataError, pair,
        ('{"input": "", "target": "x"}', "'input' is empty"),
        ('{"input": "x", "target": ""}', "'target' is empty"),
        ('{"input": "x"}', r"no key 'target'.*set data\.target_key"),
        ('{"input": 3, "target": "x"}', "'input' is int, not text"),
    ),
    *cases(DataError, chats,
        ("a.jsonl", "", "bytes", r"^data\.chat_template: the tokenizer 'bytes' has no chat template; set data\."),
        ("chats.txt", "Hi", r"holds no records by its name; give jsonl, json, parquet, csv or tsv files"),
        ("empty.jsonl", "\n", r"data\.files: no conversation in 1 files"),
    ),
    case(DataError, r"^data\.chat_template: .*nowhere: cannot be read \(No such file or directory\); gi",
         chats, "a.jsonl", "", chat_template="nowhere"),
    case(DataError, r"max_encoder_length: 20, .* 32 tokens by denoiser R_3_15", mixture, 2, max_encoder_length=20),
    case(DataError, r"num_sentinel_tokens: 1 are too few for denoiser R_3_15.* set it to 2",
         row_lengths, Ul2Settings(max_seq_length=512, max_encoder_length=512, max_decoder_length=256), 1),
    # datasets of the user's
    *cases(DataError, lambda data, batch: list(loader(data(), batch)),
        (lambda: Numbers(3), 8, r"global_batch_size: 8 sequences per step, but the training data has 3"),
        (lambda: [{"input_ids": [0] * n, "labels": [0]} for n in (1, 2)], 2,
         r"'input_ids' has different lengths in one batch \(1, 2\); give a data_collator"),
        (lambda: [{"input_ids": [0, 1]}] * 4, 4, r"no 'labels' \(its keys: input_ids\)"),
        (lambda: [([0], [0])] * 4, 4, "a sample is a tuple, expected a dict"),
        (lambda: [{"x": [{"y": 1}]}] * 4, 4, "cannot make a tensor of 'x'"),
        (lambda: Count(5), 8, "ended before the first step of 8 samples"),
        (lambda: iter([{"input_ids": torch.ones(2, 3), "names": ["a", "b"]}]), 2,
         "batch key 'names' is a list, not a tensor"),
    ),
    case(DataError, "has no samples", lambda: loader(Numbers(0), 8, drop_last=False)),
    case(DataError, "data position is sample 90, but the training data has 8",
         lambda: loader(Numbers(8)).load_state_dict({"epoch": 0, "sample": 90})),
    case(DataError, "position is that of a map-style dataset",
         lambda: loader(Count(8)).load_state_dict({"epoch": 0, "sample": 4})),
    case(DataError, r"dataloader_num_workers: .* saved with 0 workers, got 2", other_workers),
    *(case(DataError, rf"data\.{name}: nothing reads it, since what test_dispatch\.own", own, kind, **{name: True})
      for kind, name in (("numbered", "dispatch_batches"), ("stream", "dispatch_eval_batches"))),
    *cases(ConfigError, lambda *words: load_config(None, [*words]),
        ("trainer=ddp", "data=synthetic", "dispatch_batches=false",
         r"^dispatch_batches: nothing reads it with data=synthetic; ranks read its"),
        ("+data._target_=test_dispatch.own", "data.dispatch_eval_batches=true",
         r"nothing reads it with trainer=single; choose trainer=ddp"),
        ("trainer=ddp", "+data._target_=test_dispatch.own", "data.dispatch_batches=maybe",
         r"^data\.dispatch_batches: must be true or false, got 'maybe'"),
    ),
    leaves_no="cache/tokens/*",
)  # fmt: skip
