"""Loader and token cache by themselves: tokens per second of one process, MB of text per CPU second.

    OMP_NUM_THREADS=1 python scripts/bench/loader.py [--steps 2000] [--batch 8] [--seq-len 1024] [--workers 2] [--json]

The floor of the loader is 20 million tokens per second at 8 x 1024, of the cache 3 MB per second and core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("RAYON_NUM_THREADS", "1")  # the tokenizer library's threads: figures are per core

from forgather_cli.config.schema import PythonStdlibSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.data.text.corpus import find_corpus

KINDS: dict[str, dict[str, Any]] = {
    "concat": {},
    "concat, isolated": {"isolate_documents": True},
    "best_fit": {"packing": "best_fit"},
    "pad": {"packing": "pad"},
}


def main() -> None:
    args = arguments()
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        size = sum(piece.num_bytes for piece in find_corpus(PythonStdlibSettings()).pieces()) / 1e6
        for name, settings in (("bytes", {}), ("bpe 4096", {"tokenizer": "bpe"})):
            results[f"cache, {name} (MB/s)"] = size / cold_build(cache, settings)
        for name, settings in KINDS.items():
            results[f"loader, {name} (Mtok/s)"] = loader_speed(args, cache, settings, workers=0)
        results[f"loader, {args.workers} workers (Mtok/s)"] = loader_speed(args, cache, {}, workers=args.workers)
    report(results, as_json=args.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2, help="of the run with worker processes")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def cold_build(cache: str, settings: dict[str, Any]) -> float:
    """CPU seconds from nothing to a published token cache; for bpe with the tokenizer trained before."""
    if settings:
        from forgather_cli.data.cache import Cache
        from forgather_cli.data.text.tokenize import trained_bpe

        trained_bpe(find_corpus(PythonStdlibSettings()), vocab_size=4096, cache=Cache(cache))
    start = time.process_time()
    load_data(PythonStdlibSettings(cache_dir=cache, **settings), seed=0)
    return time.process_time() - start


def loader_speed(args: argparse.Namespace, cache: str, settings: dict[str, Any], *, workers: int) -> float:
    """Millions of tokens per second, from the median of 20 stretches."""
    data = load_data(PythonStdlibSettings(cache_dir=cache, seq_len=args.seq_len, **settings), seed=0)
    loader = TrainLoader(
        data.train, global_batch_size=args.batch, micro_batch_size=args.batch, seed=0, num_workers=workers
    )
    steps = forever(loader)
    stretch = max(1, args.steps // 20)
    next(steps)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(stretch):
            next(steps)
        seconds.append(time.perf_counter() - start)
    return stretch * args.batch * args.seq_len / statistics.median(seconds) / 1e6


def forever(loader: TrainLoader) -> Iterator[Any]:
    while True:
        yield from loader


def report(results: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:34} {value:10.1f}")


if __name__ == "__main__":
    main()
