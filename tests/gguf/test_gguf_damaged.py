"""GGUF files of strangers: whatever is wrong with one is a sentence, at once and within little memory."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import STOP, byte_level, made
from program import Process, printed

from forgather_cli.gguf.write import write_gguf

TOO_MANY = 2**63


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = made(byte_level(tmp_path_factory.mktemp("gguf") / "model"), STOP, hidden_size=32, num_attention_heads=2)
    write_gguf(file := model.directory / "healthy.gguf", model.contents, "f16")
    return file


def put(code: str, value: int, after: bytes, skip: int = 0) -> Callable[[bytes], bytes]:
    """Another number ``skip`` bytes behind a text."""

    def change(content: bytes) -> bytes:
        at, packed = content.index(after) + len(after) + skip, struct.pack(f"<{code}", value)
        return content[:at] + packed + content[at + len(packed) :]

    return change


TOKENS, KINDS, EMBEDDING = b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"token_embd.weight"
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "magic alone": lambda content: content[:4],
    "another magic": lambda content: b"PK" + content[2:],
    "version 1": put("I", 1, b"GGUF"),
    "of the other byte order": put("I", 3 << 24, b"GGUF"),
    "cut in its counts": lambda content: content[:20],
    "cut in its header": lambda content: content[: content.index(KINDS)],
    "cut in its tensors": lambda content: content[:-100],
    "tensors without end": put("Q", TOO_MANY, b"GGUF", 4),
    "entries without end": put("Q", TOO_MANY, b"GGUF", 12),
    "a key without end": put("Q", TOO_MANY, b"GGUF", 20),
    "an entry of another type": put("I", 99, b"llama.context_length"),
    "no number as context_length": put("I", 6, b"llama.context_length"),
    "another architecture": lambda content: content.replace(b"llama.context", b"lamma.context"),
    "texts without end": put("Q", TOO_MANY, TOKENS, 8),
    "numbers without end": put("Q", TOO_MANY, KINDS, 8),
    "a token twice": lambda content: content.replace(struct.pack("<Q", 1) + b"a", struct.pack("<Q", 1) + b"b", 1),
    "an array of arrays": put("I", 9, TOKENS, 4),
    "an array of another type": put("I", 13, KINDS, 4),
    "four billion dimensions": put("I", 2**32 - 1, EMBEDDING),
    "a dimension without end": put("Q", TOO_MANY, EMBEDDING, 4),
    "a tensor of another type": put("I", 77, EMBEDDING, 20),
    "a tensor beyond the end": put("Q", 2**40, EMBEDDING, 24),
}


# By a small process: what its children take at most counts from the memory of the process that starts them.
MEASURED = """
import resource, sys
from forgather_cli.errors import ModelError
from forgather_cli.gguf.reader import llama_cpp

for file in sys.argv[1:]:
    try:
        print(llama_cpp("context_length", model=file))
    except ModelError as error:
        print(error)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime, used.ru_maxrss)
"""


def test_a_whole_file_and_each_kind_of_damage(healthy: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.gguf" for number in range(len(DAMAGE))]
    for file, damage in zip(files, DAMAGE.values(), strict=True):
        file.write_bytes(damage(healthy.read_bytes()))
    with Process(str(healthy), *map(str, files), code=MEASURED, cold=True) as job:
        assert job.finish() == 0, job.output
    whole, *told, used = job.lines
    assert whole == "{'tokens': 256}"
    for file, line in zip(files, told, strict=True):
        assert re.fullmatch(rf"llama\.cpp cannot load and run {file.name} \(.*\)", line)
    seconds, kilobytes = map(float, used.split())
    assert seconds < len(DAMAGE)
    assert kilobytes <= 2**18


def test_a_damaged_file_given_to_eval(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before its data are read, which are not there."""
    healthy.with_name("damaged.gguf").write_bytes(DAMAGE["texts without end"](healthy.read_bytes()))
    for name, told in (("damaged", "cannot load and run damaged.gguf (failed to read key-value"), ("healthy", "none")):
        done = printed(capsys, "eval", str(healthy.with_name(f"{name}.gguf")), "data=text", "data.files=[none]")
        assert done.code == 2
        assert told in " ".join(done.err.split())
