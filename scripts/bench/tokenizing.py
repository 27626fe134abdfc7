"""Tokenizing a corpus of large files: several processes against one, in MB of text per second.

    python scripts/bench/tokenizing.py [--processes 2] [--bytes-mb 768] [--bpe-mb 64] [--rounds 3] [--json]

The ways take turns, each in a process of its own, and what counts is the ratio of their medians: two processes at least
1.7 times one. Hashing the content and training the BPE are done before. One process that leaves the
tokenizer library its threads (as ``data.tokenize_processes=1`` does) stands beside.

Then one core alone: documents as lines of jsonl become tokens on disk word by word, by the tokenizer library, and by
``datasets`` with transformers. What counts is processor time: at least five times the others' MB per second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

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

_ONE_CORE = """
import sys, time
path, directory, way, cache = sys.argv[1:]
if way == "datasets":
    from datasets import load_dataset
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(directory)
    documents = load_dataset("json", data_files=path, split="train", cache_dir=cache)
    start = time.process_time()
    ids = documents.map(lambda rows: {"ids": tokenizer(rows["text"])["input_ids"]}, batched=True, remove_columns="text")
    print(time.process_time() - start)
else:
    from forgather_cli.config.schema import TextSettings
    from forgather_cli.data.cache import Cache
    from forgather_cli.data.text.corpus import find_corpus
    from forgather_cli.data.text.tokenize import tokenize_corpus
    from forgather_cli.data.text.tokenizer import FileTokenizer, load_tokenizer
    if way == "library":
        FileTokenizer.prepare = lambda self, texts: None
    corpus, tokenizer = find_corpus(TextSettings(files=[path], eval_fraction=0.0)), load_tokenizer(directory)
    corpus.fingerprint(Cache(cache))
    tokenizer.encode("x")
    start = time.process_time()
    tokenize_corpus(corpus, tokenizer, Cache(cache), processes=1)
    print(time.process_time() - start)
"""


def main() -> None:
    args = arguments()
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = find_corpus(PythonStdlibSettings())
        text = b"".join(each.path.read_bytes() for each in source.files)
        trained_bpe(source, vocab_size=4096, cache=Cache(folder))
        (bpe,) = Path(folder, "tokenizers").iterdir()
        results |= one_core(Path(folder), bpe, args)
        for name, tokenizer, size in (("bytes", "bytes", args.bytes_mb), ("bpe", str(bpe), args.bpe_mb)):
            if not size:
                continue
            texts = written(Path(folder, name), text, size * 1_000_000)
            results |= compared(name, texts, tokenizer, size, args)
    report(results, as_json=args.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bytes-mb", type=int, default=768, help="corpus that is encoded as bytes")
    parser.add_argument("--bpe-mb", type=int, default=64, help="corpus that is encoded with a BPE of 4096 tokens")
    parser.add_argument("--core-mb", type=int, default=32, help="sources that one core encodes, no two the same")
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


def one_core(folder: Path, tokenizer: Path, args: argparse.Namespace) -> dict[str, float]:
    """MB per second of processor time, of each way, from Python's sources and those of the packages installed."""
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    size, path = 0, folder / "sources.jsonl"
    with path.open("w", encoding="utf-8") as handle:
        for source in (each for root in roots for each in sorted(root.rglob("*.py"))):
            text = source.read_text(encoding="utf-8", errors="replace")
            if text and size < args.core_mb * 1_000_000:
                size += len(text.encode())
                handle.write(json.dumps({"text": text}) + "\n")
    seconds: dict[str, list[float]] = {way: [] for way in ("words", "library", "datasets")}
    for _ in range(args.rounds):
        for way, each in seconds.items():
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                each.append(python(_ONE_CORE, path, tokenizer, way, cache, threads="1"))
    median = {way: statistics.median(each) for way, each in seconds.items()}
    speeds = {f"one core, {way} (MB/s)": size / 1e6 / each for way, each in median.items()}
    ratios = {f"one core, words over {way}": median[way] / median["words"] for way in ("library", "datasets")}
    return speeds | ratios


def python(code: str, *arguments: Any, threads: str) -> float:
    """The number that a program prints last."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environ = os.environ | {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": str(threads != "1").lower()}
    return float(subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def run(texts: Path, tokenizer: str, processes: int, threads: str) -> float:
    """Seconds from known content to a published token cache."""
    with tempfile.TemporaryDirectory(dir=texts.parent) as root:
        return python(_RUN, texts, tokenizer, processes, root, threads=threads)


def report(results: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:40} {value:8.2f}")


if __name__ == "__main__":
    main()
