"""Writing a GGUF file of a random Llama with 1.1 billion parameters: its time against reading and writing the same
bytes, and its memory above that of the interpreter.

    python scripts/bench/gguf.py [--type q8_0] [--dtype bf16] [--reps 5] [--folder /tmp]

In turns, each in a process of its own: the bytes of the source are read, the bytes of the file written and synced; and
the file is made. The source is in the page cache each time, but for ``--cold``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
_RESIDENT = """
def resident(what):
    from pathlib import Path
    return int(dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())[what].split()[0])
"""
_PLAIN = """
import json, os, sys, time
source, file, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
buffer = memoryview(bytearray(8 << 20))
start = time.perf_counter()
with open(source, "rb", buffering=0) as read, open(file, "wb", buffering=0) as written:
    while count := read.readinto(buffer):
        pass
    while size > 0:
        size -= written.write(buffer[:size])
    unsynced = time.perf_counter() - start
    os.fsync(written.fileno())
print(json.dumps({"s": time.perf_counter() - start, "before_sync_s": unsynced, "cpu_s": time.process_time()}))
"""
_MADE = (
    _RESIDENT
    + """
from forgather_cli.launch.processes import keep_heap
keep_heap()  # as the command does
import gguf, json, sys, time
from pathlib import Path
from forgather_cli.checkpoint.files import sync_file
from forgather_cli.checkpoint.tensors import Weights
from forgather_cli.gguf.architecture import architecture_of
from forgather_cli.gguf.write import Contents, write_gguf
directory, file, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
tokens = [f"token {n}" for n in range(32000)]
vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
before, cpu = resident("VmRSS"), time.process_time()
start = time.perf_counter()
model = architecture_of(json.loads((directory / "config.json").read_text()))
contents = Contents(model, Weights(directory), vocabulary)
write_gguf(file, contents, kind)
unsynced = time.perf_counter() - start
sync_file(file)
made = {"s": time.perf_counter() - start, "before_sync_s": unsynced, "cpu_s": time.process_time() - cpu}
above = (resident("VmHWM") - before) / 1e3
print(json.dumps({**made, "above_MB": above, "interpreter_MB": before / 1e3, "told": contents.num_bytes(kind)}))
"""
)


def make_model(directory: Path, dtype: str) -> None:
    import torch

    from forgather_cli.checkpoint.tensors import spec_of, write_weights
    from forgather_cli.config.schema import DecoderSettings
    from forgather_cli.models.decoder import Decoder
    from forgather_cli.models.pretrained import write_config

    settings = DecoderSettings(**SHAPE)
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(settings).named_parameters()}
    generator, kind = torch.Generator().manual_seed(0), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]

    class Drawn:
        def __getitem__(self, name: str) -> Any:
            return torch.empty(shapes[name], dtype=kind).normal_(0.0, 0.02, generator=generator)

    directory.mkdir()
    write_weights(directory, [spec_of(name, kind, shape) for name, shape in shapes.items()], Drawn(), 1 << 40)
    write_config(directory, settings, SimpleNamespace(eos_token_id=2, bos_token_id=1))


def run(code: str, *words: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", default="q8_0")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--folder", help="where the files are; the system's folder for temporary ones")
    parser.add_argument("--cold", action="store_true", help="the source comes from the disk")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        directory, file = Path(name, "model"), Path(name, "file.gguf")
        make_model(directory, arguments.dtype)
        weights = directory / "model.safetensors"
        run(_MADE, str(directory), str(file), arguments.type)  # the first warms all up
        size = file.stat().st_size
        print(f"{weights.stat().st_size / 1e9:.2f} GB {arguments.dtype} read, {size / 1e9:.2f} GB written")
        ratios, ratios_before = [], []
        for _ in range(arguments.reps):
            rows = []
            for code, words in ((_PLAIN, [str(weights), str(file), str(size)]),
                                (_MADE, [str(directory), str(file), arguments.type])):  # fmt: skip
                file.unlink(missing_ok=True)
                os.sync()
                if arguments.cold:
                    with weights.open("rb") as opened:
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                rows.append(run(code, *words))
            print(*rows, flush=True)
            ratios.append(rows[1]["s"] / rows[0]["s"])
            ratios_before.append(rows[1]["before_sync_s"] / rows[0]["before_sync_s"])
        print(f"median ratio {statistics.median(ratios):.2f}, before the sync {statistics.median(ratios_before):.2f}")


if __name__ == "__main__":
    main()
