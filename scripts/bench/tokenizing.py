"""Tokenizing a corpus of large files: several processes against one, in MB of text per second.

    python scripts/bench/tokenizing.py [--processes 2] [--bytes-mb 768] [--bpe-mb 64] [--rounds 3] [--json]

The ways take turns, each in a process of its own, and what counts is the ratio of their medians: two processes at least
1.7 times one. Hashing the content and training the BPE are done before. One process with the tokenizer library's own
threads (what ``data.tokenize_processes=1`` gives) stands beside.
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

from forgather_cli.config.schema import PythonStdlibSettings
from forgather_cli.data.cache import Cache
from forgather_cli.data.text.corpus import find_corpus
from forgather_cli.data.text.tokenize import trained_bpe

_RUN = """
import sys, time
from forgather_cli.config.schema import TextSettings
from forgather_cli.data.cache import Cache
from forgather_cli.data.text.tokenize import tokenize_corpus
from forgather_cli.data.text.corpus import find_corpus
from forgather_cli.data.text.tokenizer import load_tokenizer

folder, tokenizer, processes, cache = sys.argv[1], load_tokenizer(sys.argv[2]), int(sys.argv[3]), Cache(sys.argv[4])
corpus = find_corpus(TextSettings(files=[folder + "/*.txt"], eval_fraction=0.0))
corpus.fingerprint(cache)
tokenizer.encode("x")
start = time.perf_counter()
tokenize_corpus(corpus, tokenizer, cache, processes=processes)
print(time.perf_counter() - start)
"""


def main() -> None:
    args = arguments()
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = find_corpus(PythonStdlibSettings())
        text = b"".join(each.path.read_bytes() for each in source.files)
        trained_bpe(source, 4096, Cache(folder))
        (bpe,) = Path(folder, "tokenizers").iterdir()
        for name, tokenizer, size in (("bytes", "bytes", args.bytes_mb), ("bpe", str(bpe), args.bpe_mb)):
            texts = written(Path(folder, name), text, size * 1_000_000)
            results |= compared(name, texts, tokenizer, size, args)
    report(results, as_json=args.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bytes-mb", type=int, default=768, help="corpus that is encoded as bytes")
    parser.add_argument("--bpe-mb", type=int, default=64, help="corpus that is encoded with a BPE of 4096 tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def written(folder: Path, text: bytes, size: int) -> Path:
    """``size`` bytes of text in two files."""
    folder.mkdir()
    for number in range(2):
        with (folder / f"{number}.txt").open("wb") as handle:
            left = size // 2
            while left > 0:
                left -= handle.write(text[:left])
    return folder


def compared(name: str, texts: Path, tokenizer: str, size: int, args: argparse.Namespace) -> dict[str, float]:
    ways = {"one": (1, "1"), "several": (args.processes, "1"), "threads": (1, str(args.processes))}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, (processes, threads) in ways.items():
            seconds[way].append(run(texts, tokenizer, processes, threads))
    median = {way: statistics.median(each) for way, each in seconds.items()}
    return {
        f"{name}, one process, one thread (MB/s)": size / median["one"],
        f"{name}, one process, {args.processes} threads (MB/s)": size / median["threads"],
        f"{name}, {args.processes} processes (MB/s)": size / median["several"],
        f"{name}, {args.processes} processes over one": median["one"] / median["several"],
    }


def run(texts: Path, tokenizer: str, processes: int, threads: str) -> float:
    """Seconds from known content to a published token cache."""
    with tempfile.TemporaryDirectory(dir=texts.parent) as root:
        command = [sys.executable, "-c", _RUN, str(texts), tokenizer, str(processes), root]
        environ = os.environ | {"RAYON_NUM_THREADS": threads}
        return float(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)


def report(results: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:40} {value:8.2f}")


if __name__ == "__main__":
    main()
