"""Mixtures: how far sources are from their shares beside other samplers, and what ten of them cost beside one.

    OMP_NUM_THREADS=1 python scripts/bench/mixture.py [accuracy] [loader] [training] [--rounds 20] [--json]

accuracy: the largest distance of any source's count from its quota, before any of the first 200,000 sequences, in
sequences; of rules that draw at random the median of five seeds. The floor of ours is that none is 1 or more. What
others do is written down here from their sources: Levanter 1.2 (data/mixture.py, blocks of 2,048 as its configs have)
and Grain 0.2.18 (dataset/transformations/mix.py). torchdata's is the one that is installed.

loader, training: sequences per second of a mixture of ten sources, over those of the ten files as one source. Both are
in one process and take turns; the ratio is that of a turn to the other's of the same round, its median and quartiles.
``loader`` does nothing but read, and is slower by what each source of a batch costs in Python; ``training`` takes steps
of the smallest model. The floor of training is 0.97.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from turns import Turns, in_turns

Order = NDArray[Any]
"""The source of each sequence."""
SEEDS = range(5)
WEIGHTS = {
    "4 sources": ["0.7", "0.2", "0.07", "0.03"],
    "15 sources": [f"{share:.3f}" for share in np.random.default_rng(15).dirichlet(np.full(15, 2.0))],
}
BLOCK = 2048
NUM_SOURCES, SOURCE_TOKENS = 10, 2_000_000


def main() -> None:
    args = arguments()
    results: dict[str, Any] = {}
    if "accuracy" in args.parts:
        results |= accuracy(args)
    with tempfile.TemporaryDirectory() as folder:
        if {"loader", "training"} & {*args.parts}:
            recipes = written(Path(folder), args)
        if "loader" in args.parts:
            results |= loader(recipes, args)
        if "training" in args.parts:
            results |= training(recipes, args)
    report(results, as_json=args.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["accuracy", "loader", "training"]
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)}; all where none is named")
    parser.add_argument("--length", type=int, default=200_000, help="sequences of the accuracy")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each")
    parser.add_argument("--loader-steps", type=int, default=500, help="steps of a turn that only reads")
    parser.add_argument("--training-steps", type=int, default=10, help="steps of a turn that trains")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--seq-len", type=int, default=1024, help="of the loader; training has 128")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.parts = args.parts or parts
    if unknown := {*args.parts} - {*parts}:
        parser.error(f"no such part: {', '.join(unknown)}")
    return args


# --------------------------------------------------------------------------------------------------------- accuracy


def accuracy(args: argparse.Namespace) -> dict[str, float]:
    results = {}
    for name, rule in RULES.items():
        for title, weights in WEIGHTS.items():
            found = [worst(rule(weights, args.length, seed), weights) for seed in SEEDS]
            results[f"{name}, {title} (sequences)"] = statistics.median(found)
    return results


def worst(order: Order, weights: Sequence[str]) -> float:
    """In whole numbers, so that a distance of 1 is not one of 0.99999."""
    exact = [Fraction(weight) for weight in weights]
    unit = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    positions = np.arange(1, len(order) + 1)
    most = [
        np.abs(np.cumsum(order == source) * sum(whole) - positions * weight).max()
        for source, weight in enumerate(whole)
    ]
    return float(max(most) / sum(whole))


def ours(weights: Sequence[str], length: int, seed: int) -> Order:
    from forgather_cli.data.mixture.stretches import Mixture, Stretch, Supply, exact

    names = [f"{number:02}" for number in range(len(weights))]
    sources = dict.fromkeys(names, Supply(samples=10_000))
    typed = exact(dict(zip(names, weights, strict=True)))
    return Mixture([Stretch(0, sources, [(0, typed)])]).deal(0, length)[0]


def drawn(weights: Sequence[str], length: int, seed: int) -> Order:
    import torch

    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
    return torch.multinomial(shares, length, replacement=True, generator=generator).numpy()


def torchdata(weights: Sequence[str], length: int, seed: int) -> Order:
    from torchdata.nodes import IterableWrapper, MultiNodeWeightedSampler, StopCriteria

    node = MultiNodeWeightedSampler(
        {f"{number}": IterableWrapper(itertools.repeat(number)) for number in range(len(weights))},
        {f"{number}": float(weight) for number, weight in enumerate(weights)},
        StopCriteria.CYCLE_FOREVER,
        seed=seed,
    )
    node.reset()
    return np.fromiter(node, np.int64, length)


def levanter(weights: Sequence[str], length: int, seed: int) -> Order:
    """Every block has the same counts: shares of it without what is behind the point; the largest gets what is missing.
    The order in a block is drawn."""
    shares = np.array([float(weight) for weight in weights])
    counts = (shares / shares.sum() * BLOCK).astype(int)
    counts[counts.argmax()] += BLOCK - counts.sum()
    block = np.repeat(np.arange(len(counts)), counts)
    blocks = np.tile(block, (-(-length // BLOCK), 1))
    return np.random.default_rng(seed).permuted(blocks, axis=1).reshape(-1)[:length]


def grain(weights: Sequence[str], length: int, seed: int) -> Order:
    """Shares are whole numbers, of which the smallest is 100. The first source has its quota, rounded up; the second
    its own of what is left, and so on."""
    floats = [float(weight) for weight in weights]
    whole = [int(weight * (100 / min(floats))) for weight in floats]
    rest, counts = np.arange(length + 1), []
    for source, weight in enumerate(whole):
        others = sum(whole[source + 1 :])
        left = rest * others // (weight + others)
        counts.append(rest - left)
        rest = left
    return np.diff(counts).argmax(axis=0)


RULES: dict[str, Callable[[Sequence[str], int, int], Order]] = {
    "data=mixture": ours,
    "torch.multinomial": drawn,
    "torchdata, MultiNodeWeightedSampler": torchdata,
    "Levanter, blocks": levanter,
    "Grain, MapDataset.mix": grain,
}

# ------------------------------------------------------------------------------------------------------------ speed


def written(folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """A recipe for each way to read ten files of random bytes."""
    files = []
    for number in range(NUM_SOURCES):
        files.append(str(folder / f"{number}.npy"))
        np.save(files[-1], np.random.default_rng(number).integers(256, size=SOURCE_TOKENS, dtype=np.uint16))
    sources = {
        f"s{number}": {"type": "tokens", "files": [file], "weight": number + 1} for number, file in enumerate(files)
    }
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "one": ("tokens", {"files": files}), "mixture": ("mixture", {"sources": sources}),
    }  # fmt: skip
    recipes = {}
    for way, (option, data) in ways.items():
        recipe = {
            "defaults": ["train", {"override model": "nano"}, {"override data": option}, "_self_"],
            "data": {"tokenizer": "bytes", "seq_len": args.seq_len, **data},
        }
        recipes[way] = str(folder / f"{way}.yaml")
        Path(recipes[way]).write_text(yaml.safe_dump(recipe))
    return recipes


def loader(recipes: dict[str, str], args: argparse.Namespace) -> dict[str, float]:
    from forgather_cli.config.load import load_config
    from forgather_cli.data.build import load_data
    from forgather_cli.data.loaders.loader import TrainLoader

    steps = {}
    for way, recipe in recipes.items():
        data = load_data(load_config(recipe, []).config.data, seed=0)
        made = TrainLoader(data.train, global_batch_size=args.batch, micro_batch_size=args.batch, seed=0)
        steps[way] = itertools.chain.from_iterable(itertools.repeat(made))
        next(steps[way])
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(args.rounds):
        for way, each in steps.items():
            start = time.perf_counter()
            for _ in range(args.loader_steps):
                next(each)
            seconds[way].append((time.perf_counter() - start) / args.loader_steps)
    return compared("loader", seconds, args.batch)


def training(recipes: dict[str, str], args: argparse.Namespace) -> dict[str, float]:
    import torch

    from forgather_cli import compose

    steps = (args.rounds + 1) * args.training_steps
    turns = Turns(tuple(recipes), block=args.training_steps)

    def run(way: str) -> None:
        torch.set_num_threads(1)  # the setting is each thread's own
        with tempfile.TemporaryDirectory() as out:
            compose(
                recipes[way], f"max_steps={steps}", "seq_len=128", f"global_batch_size={args.batch}",
                f"per_device_train_batch_size={args.batch}", "precision=fp32", "eval_strategy=no", "save_strategy=no",
                "callbacks=minimal", "callbacks.progress=null", "device=cpu", f"output_dir={out}/run",
            ).train()  # fmt: skip

    in_turns(turns, run)
    seconds = {way: [wall for wall, _ in found[1:]] for way, found in turns.blocks.items()}
    return compared("training", seconds, args.batch)


def compared(name: str, seconds: dict[str, list[float]], batch: int) -> dict[str, float]:
    """``seconds``: of a step, in each turn."""
    speeds = {f"{name}, {way} (sequences/s)": batch / statistics.median(each) for way, each in seconds.items()}
    ratios = [one / mixture for one, mixture in zip(seconds["one"], seconds["mixture"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return speeds | {f"{name}, mixture over one": middle, f"{name}, its quartiles, lower": low, f"{name}, upper": high}


def report(results: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:64} {value:10.3f}")


if __name__ == "__main__":
    main()
