"""``forgather serve`` as a process, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from program import Process

from forgather_cli.launch.processes import children


class Served(Process):
    """A server that answers, on a port of its own."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__("serve", *words, "--port", "0", env=env)
        self.url = self.read_until(r"^http://.*/v1$").strip()
        self.key = self.read_until("^key: ").removeprefix("key: ").strip()

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key or self.key, max_retries=0, timeout=600)

    @property
    def llama(self) -> int:
        """The id of llama.cpp's process."""
        told = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children(self.process.pid)}
        (found,) = (child for child, words in told.items() if "plain_server.py" in words)
        return found


@contextmanager
def streaming(server: Served) -> Iterator[Any]:
    """While an answer streams that does not end by itself for long; its pieces."""
    stream = server.client().completions.create(
        model="any", prompt="The", max_tokens=90_000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(stream)
    yield stream


def f32_file(directory: Path, context: int) -> Path:
    """A GGUF file of a small random model."""
    from gguf_files import STOP, byte_level, made

    from forgather_cli.gguf.write import write_gguf

    model = made(byte_level(directory), STOP, max_position_embeddings=context)
    write_gguf(directory / "random.gguf", model.contents, "f32")
    return directory / "random.gguf"
