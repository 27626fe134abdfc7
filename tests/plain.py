"""Forks interpreters that have imported torch and transformers and nothing of ours: what ``finalize`` loads its
result in, as tests start it (``forks.Plain``).

Only the process that ``forks`` forks from imports this, before it imports anything of ours; it ends with that one.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from typing import NoReturn


def _serve(server: socket.socket) -> NoReturn:
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    gc.freeze()
    while True:
        client, _ = server.accept()
        if os.fork() == 0:
            _run(client)
        client.close()


def _run(client: socket.socket) -> NoReturn:
    """Run the script that is asked for, with the client's files, and answer with its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
    sys.argv, environment, directory = json.loads(request)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    client.sendall(b"%d" % code)
    os._exit(code)


for _name in ("auto.modeling_auto", "auto.tokenization_auto", "llama.modeling_llama", "qwen3.modeling_qwen3"):
    importlib.import_module(f"transformers.models.{_name}")
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")  # makes all
assert "forgather_cli" not in sys.modules
_server = socket.socket(socket.AF_UNIX)
_server.bind(os.environ["FORGATHER_TESTS_PLAIN"])
_server.listen()
if os.fork() == 0:
    _serve(_server)
_server.close()
