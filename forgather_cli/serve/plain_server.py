"""llama.cpp's server: ``python -P plain_server.py``, asked by an environment variable. It ends with its standard input.

Nothing of Forgather is imported here, nor torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path

ASKED = "FORGATHER_SERVE"
"""Environment variable: the arguments of ``start``, JSON."""
READY = "forgather-serve-ready"
"""What the line begins with that says that it answers, at which port, and which template chats go by."""


def start(model: str, host: str, port: int, key: str | None, name: str, context: int) -> None:
    """Serve until the end of the process; a line says from when."""
    import xllamacpp

    with Path(model).open("rb") as file:
        head = file.read(1 << 26)  # keys with their values; gguf takes seconds to read a large vocabulary
    found = re.search(rb"\.context_length\x04\0\0\0(.{4})", head, re.DOTALL)
    most = int.from_bytes(found[1], "little") if found else 0  # without it the file does not load
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = model, {name}
    params.hostnames, params.port, params.api_keys = [host], port, [] if key is None else [key]
    params.verbosity = 1  # errors alone
    params.ui = params.endpoint_slots = False  # what others ask is nobody's business
    # each request may take as much as the model; all at once four times that, if these are no more than 32,768 tokens
    params.n_parallel, params.kv_unified = 4, True
    params.n_ctx = context or max(most, min(most * 4, 32768))
    if b"general.file_type\x04\0\0\0\0\0\0\0" in head:  # ALL_F32
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)  # it serves as long as it is there
    taken = server.listening_address.rpartition(":")[2]  # for 0 one that llama.cpp has found
    has_template = b"tokenizer.chat_template\x08" in head
    template = "the file's template" if has_template else "ChatML's, since the file has no template"
    print(READY, taken, template, flush=True)
    os.read(0, 1)  # nothing is to be read: it ends when who asked has ended, however that is
    os._exit(1)  # the server's threads may wait for each other at the end (xllamacpp 2026.10)


if __name__ == "__main__":
    if sys.platform.startswith("linux"):  # PR_SET_PDEATHSIG: no thread of Python runs while a model is loaded
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    # llama.cpp would wait for its answers to end; it is who asked that is told to stop
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    start(*json.loads(os.environ[ASKED]))
