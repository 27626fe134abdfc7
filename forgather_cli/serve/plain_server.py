"""llama.cpp's server: ``python -P plain_server.py``, with a line of JSON on standard input, whose end is its own.

Nothing of Forgather is imported here, nor torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from typing import Any

READY = "forgather-serve-ready"
"""What the line begins with that says that it answers."""
TAKEN = "couldn't bind HTTP server socket"
"""What llama.cpp says of a port that it does not get."""
_SHARED = 32768  # tokens of all requests at once, where a context is no longer


def start(asked: dict[str, Any]) -> tuple[Any, bool]:
    """The server, which answers, and whether its file has a chat template."""
    import xllamacpp

    most, is_f32, has_template = read_facts(asked["model"])
    length = min(most, asked["context"] or most)
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.hostnames, params.port = [asked["host"]], asked["port"]
    params.api_keys = [] if asked["key"] is None else [asked["key"]]
    params.model_alias = {asked["name"]}
    params.verbosity = 1  # errors alone
    params.ui = params.endpoint_slots = False  # what others ask is nobody's business
    # each request may take the whole length; what is kept for all at once is bounded
    params.n_parallel, params.kv_unified, params.kv_unified_per_slot = asked["parallel"], True, length
    params.n_ctx = max(length, min(length * asked["parallel"], _SHARED))
    if is_f32:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params), has_template


def read_facts(file: str) -> tuple[int, bool, bool]:
    """The length of a file's context, whether its type is fp32, and whether it has a chat template.

    By llama.cpp's library, since gguf takes seconds for a large vocabulary.
    """
    import xllamacpp.xllamacpp

    class Params(ctypes.Structure):  # gguf_init_params
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    library: Any = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, result, *arguments in (
        ("init_from_file", ctypes.c_void_p, ctypes.c_char_p, Params),
        ("find_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p),
        ("get_val_u32", ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64),
        ("get_val_str", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64),
    ):
        function = getattr(library, f"gguf_{name}")
        function.restype, function.argtypes = result, arguments
    found = library.gguf_init_from_file(os.fsencode(file), Params(True, None))
    if found is None or (key := library.gguf_find_key(found, b"general.architecture")) < 0:
        return 0, False, False  # loading it says what is wrong
    length = library.gguf_find_key(found, library.gguf_get_val_str(found, key) + b".context_length")
    kind = library.gguf_find_key(found, b"general.file_type")
    return (
        0 if length < 0 else library.gguf_get_val_u32(found, length),
        kind >= 0 and library.gguf_get_val_u32(found, kind) == 0,
        library.gguf_find_key(found, b"tokenizer.chat_template") >= 0,
    )


def end_with_input() -> None:
    """Nothing more is to be read: it ends when who asked has ended, however that is."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    if sys.platform.startswith("linux"):  # PR_SET_PDEATHSIG: no thread of Python runs while a model is loaded
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    # llama.cpp would wait for its answers to end; it is who asked that is told to stop
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        server, has_template = start(request)
    except Exception as error:  # whatever llama.cpp raises, it does not serve the file
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        os._exit(1)
    print(READY, "chat" if has_template else "", flush=True)
    threading.Event().wait()
