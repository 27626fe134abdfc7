#!/usr/bin/env python
"""Loss per compute: recipes against each other and against transformers' models, in nats per byte of held-out text.

    python scripts/bench/quality.py run default plain llama_adamw nanochat_muon [--sizes nano tiny]
        [--corpora stdlib prose headers] [--seeds 1 2 3] [--rates 1e-3 1.4e-3 2e-3] [--steps 400] [--jobs 2]
        [--out quality.jsonl]
    python scripts/bench/quality.py run 'mine: learning_rate=1e-2 optimizer.momentum=0.9'
    python scripts/bench/quality.py table [--base default] [--fresh 11] [--precision bf16]
        [--out scripts/bench/quality.jsonl]
    python scripts/bench/quality.py plot PICTURE.png [--out scripts/bench/quality.jsonl]

``run`` adds a line to ``--out`` for each run that is not there yet; the runs of docs/measured.md lie beside this file.
A recipe is a name of the table below, or a name of your own, a colon and overrides of ``forgather train``. ``--rates``
takes each of them instead of the recipe's own rate.
``--as-long-as NAME`` gives a recipe the steps that fit into the time of that one's runs (same size, corpus and steps).

The number: the sum of the losses of all targets of the whole held-out split, in sequences as they are trained on, over
the bytes of those targets; its standard error is over documents. Every model is measured by the same function here,
from its Hugging Face directory. ``table`` chooses each recipe's rate by the runs with seeds below ``--fresh`` and shows
the runs of that rate with the seeds from there on, where there are any. Two recipes are compared by the differences of
their runs with equal seeds: Student's t-test and interval, with Holm's correction over the claims of a table. Times are
seconds of one thread, of runs on the same processor: this one's for ``--as-long-as``, that of most runs in ``table``.
They begin with an empty cache: training a tokenizer and tokenizing count.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SITE = Path(sysconfig.get_paths()["purelib"])

SIZES = {  # overrides; parameters with bytes
    "nano": ("model=nano",),  # 0.13 M
    "tiny": ("model=tiny",),  # 3.3 M
    "10m": (
        "model=tiny",
        "model.hidden_size=384",
        "model.num_hidden_layers=6",
        "model.num_attention_heads=6",
    ),  # 10.8 M
    "60m": ("model=60m",),  # 25.6 M with bytes: for the transfer of settings over width
}
CORPORA = ("stdlib", "prose", "headers")
_OLD = "lr_scheduler=cosine model.qk_norm=false model.zero_init_outputs=false"
RECIPES = {
    "default": "learning_rate=5e-3",  # of bytes, as all others here: by equal tokens
    "bpe": "learning_rate=5e-3 tokenizer=bpe",  # the default recipe as it is, by equal time: 300 steps
    "plain": f"optimizer=adamw learning_rate=2e-3 {_OLD}",  # the default of 0.1.0
    "plain_qk": f"optimizer=adamw learning_rate=2e-3 {_OLD} model.qk_norm=true",
    # rivals, through transformers: see _rival
    "llama_adamw": "learning_rate=2e-3",
    "nanochat_muon": "learning_rate=1e-2",
}
RIVALS = ("llama_adamw", "nanochat_muon")
COMMON = (
    "global_batch_size=8", "per_device_train_batch_size=8", "warmup_steps=20", "eval_strategy=no",
    "save_strategy=steps",
    "save_steps=1000000", "async_save=false", "callbacks=minimal", "logging_steps=20",
    "tokenizer=bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run; ``words`` are overrides, of which a rival reads its rate alone."""

    recipe: str
    words: str
    size: str
    corpus: str
    seed: int
    steps: int
    precision: str
    as_long_as: str = ""
    """Its steps are those that fit into the time of so many of another recipe: "400 steps of plain"."""

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def rate(self) -> float:
        rates = [word.partition("=")[2] for word in self.words.split() if word.startswith("learning_rate=")]
        return float(rates[-1])


# --------------------------------------------------------------------------------------------------------- the corpora


def prose(folder: Path) -> Path:
    """English that is installed with the packages of this environment: docstrings, one document for each package's
    folder, each paragraph once. Returns a file of JSON lines.
    """
    path = folder / "prose.jsonl"
    if path.exists():
        return path
    seen: set[str] = set()
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        for name in ("torch", "transformers", "numpy", "matplotlib", "pandas", "accelerate", "datasets", "torchao"):
            for source in sorted((SITE / name).rglob("*.py")):
                paragraphs = [text for text in _docstrings(source) if text not in seen]
                seen.update(paragraphs)
                text = "\n\n".join(paragraphs)
                if len(text) >= 2000:
                    file.write(json.dumps({"text": text}) + "\n")
    part.replace(path)
    return path


def _docstrings(source: Path) -> Iterator[str]:
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            for paragraph in text.split("\n\n"):
                if len(paragraph) > 80:
                    yield inspect.cleandoc(paragraph)


def words_of(job: Job, output_dir: Path, device: str = "cpu") -> list[str]:
    """What ``forgather train`` gets."""
    include = SITE / "torch/include"
    files = {
        "prose": prose(Path(tempfile.gettempdir())),
        "headers": f"{include}/torch/**/*.h,{include}/c10/**/*.h",  # C++ that comes with PyTorch, written by people
    }
    data = [] if job.corpus == "stdlib" else ["data=text", f"data.files=[{files[job.corpus]}]"]
    words = [*SIZES[job.size], *data, *COMMON, f"max_steps={job.steps}", f"seed={job.seed}"]
    return [*words, f"precision={job.precision}", f"device={device}", *job.words.split(), f"output_dir={output_dir}"]


# --------------------------------------------------------------------------------------------------------------- a run


def train(job: Job, folder: Path, device: str = "cpu") -> tuple[Path, Any, float]:
    """Train in an empty folder; returns the model's directory, the config and seconds of this process's threads."""
    from forgather_cli.config.load import load_config
    from forgather_cli.launch.processes import keep_heap

    if job.recipe not in RIVALS:
        keep_heap()  # as the command does
    root = folder / "run"
    config = load_config(None, [*words_of(job, root, device), f"cache_dir={folder}/cache"]).config
    begin = time.process_time()
    directory = _rival(job, config, root) if job.recipe in RIVALS else _ours(config, root)
    return directory, config, time.process_time() - begin


def run_one(job: Job, device: str = "cpu") -> dict[str, Any]:
    """Train and measure; returns what is written to ``--out`` besides the job.

    A GPU stands in for a laptop: in fp32 without TF32, Muon's iteration too."""
    import torch
    from transformers import AutoModelForCausalLM

    from forgather_cli.data.build import load_data

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        in_fp32 = patch("forgather_cli.optim.muon.slow_in_bf16", lambda _: True)
        with in_fp32 if device == "cuda" else nullcontext():
            directory, config, seconds = train(job, Path(folder), device)
        data = load_data(config.data, seed=job.seed)
        model = AutoModelForCausalLM.from_pretrained(directory).to(device)
        documents = nats_of_documents(model, data, job.precision)
    nats, size = (sum(column) for column in zip(*documents, strict=True))
    return {
        "nats_per_byte": nats / size,
        "standard_error": _ratio_error(documents),
        "documents": len(documents),
        "bytes": size,
        "halves": [[sum(column) for column in zip(*documents[half::2], strict=True)] for half in (0, 1)],
        "data": data.fingerprint,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": job.steps * 8 * config.data.seq_len,
        "seconds": seconds,
        "processor": torch.cuda.get_device_name() if device == "cuda" else processor_name(),
    }


def processor_name() -> str:
    """Name, family and model, as "AMD EPYC 26/2": hypervisors hide the rest."""
    from forgather_cli.hardware import cpuinfo, processor

    return f"{processor()[0]} {cpuinfo().get('cpu family', '')}/{cpuinfo().get('model', '')}"


def _ours(config: Any, root: Path) -> Path:
    from forgather_cli import worker
    from forgather_cli.run_dir import RunDir

    run = RunDir(root)
    root.mkdir()
    worker.build(config, run).train()
    return run.checkpoint(run.checkpoint_steps()[-1]) / "model"


def _rival(job: Job, config: Any, root: Path) -> Path:
    """transformers' model of the same shape, trained on the same sequences through that library's Trainer: cosine to a
    tenth after the same warmup, clipping at 1, betas 0.9 and 0.95, weight decay 0.1 of the matrices, as ours.

    ``nanochat_muon`` is its nanochat class (squared ReLU, norms without weights, capped logits, norm of queries and
    keys) with as many parameters in its MLP, torch's Muon for the matrices of its layers and AdamW for the rest.
    """
    import torch
    from torch.utils.data import Dataset
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        NanoChatConfig,
        NanoChatForCausalLM,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from forgather_cli.data.build import load_data
    from forgather_cli.models.decoder import resolve_decoder

    data = load_data(config.data, seed=job.seed)
    shape = resolve_decoder(config.model, vocab_size=data.vocab_size, seq_len=data.seq_len)
    assert shape.intermediate_size is not None
    sizes = {
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers, "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads, "max_position_embeddings": data.seq_len,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip

    class Sequences(Dataset[Any]):
        def __len__(self) -> int:
            return len(data.train)

        def __getitem__(self, index: int) -> dict[str, Any]:
            sample = data.train[index]
            return {"input_ids": sample["input_ids"], "labels": sample["labels"]}

    set_seed(job.seed)
    if job.recipe == "llama_adamw":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=shape.intermediate_size))
    else:
        wide = 3 * shape.intermediate_size // 2
        model = NanoChatForCausalLM(NanoChatConfig(**sizes, intermediate_size=wide))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    if job.recipe == "llama_adamw":
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer: Any = torch.optim.AdamW(groups, lr=job.rate, betas=(0.9, 0.95), fused=True)
    else:
        optimizer = _Both(
            torch.optim.Muon(matrices, lr=job.rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=job.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )

    def scale(step: int) -> float:
        if step < 20:
            return (step + 1) / 20
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 20) / max(1, job.steps - 20)))

    arguments = TrainingArguments(
        str(root), max_steps=job.steps, per_device_train_batch_size=8, max_grad_norm=1.0, seed=job.seed,
        report_to=[], save_strategy="no", logging_strategy="no", use_cpu=config.device == "cpu", tf32=False,
        bf16=job.precision == "bf16", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    Trainer(model=model, args=arguments, train_dataset=Sequences(), optimizers=(optimizer, schedule)).train()
    model.save_pretrained(root / "model")
    return root / "model"


def _Both(*optimizers: Any) -> Any:
    """One optimizer out of several, as transformers' Trainer wants it. Muon's iteration is in fp32 where bf16 is slow:
    on a CPU with AVX2 alone a step of tiny took 8 s (torch 2.13).
    """
    import torch

    from forgather_cli.optim.muon import slow_in_bf16

    slow = slow_in_bf16(torch.device("cpu"))

    class Both(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([group for each in optimizers for group in each.param_groups], {})
            self.param_groups = [group for each in optimizers for group in each.param_groups]

        def step(self, closure: Any = None) -> None:
            with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone) if slow else nullcontext():
                for each in optimizers:
                    each.step()

    return Both()


def nats_of_documents(model: Any, data: Any, precision: str) -> list[tuple[float, int]]:
    """(sum of the losses of its targets, their bytes) of each held-out document, computed in the precision of training;
    documents end with the end token.
    """
    import torch
    import torch.nn.functional as F

    end = data.tokenizer.eos_token_id
    length = data.tokenizer.bytes_of_tokens().tolist()
    found: list[list[float]] = [[0.0, 0]]
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(data.eval), 16):
            batch = data.eval.__getitems__(list(range(start, min(start + 16, len(data.eval)))))
            ids, labels = (batch[name].long().to(model.device) for name in ("input_ids", "labels"))
            with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(input_ids=ids).logits[:, :-1].float()
            losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none")
            for target, loss in zip(labels[:, 1:].flatten().tolist(), losses.tolist(), strict=True):
                if target == -100:
                    continue
                found[-1][0] += loss
                found[-1][1] += length[target]
                if target == end:
                    found.append([0.0, 0])
    return [(nats, int(size)) for nats, size in found if size]


def _ratio_error(documents: Sequence[tuple[float, int]]) -> float:
    """Standard error of sum(nats) / sum(bytes) over documents as drawn at random (the ratio estimator's)."""
    count = len(documents)
    nats, size = (sum(column) for column in zip(*documents, strict=True))
    squares = sum((each - nats / size * own) ** 2 for each, own in documents)
    return math.sqrt(count / max(1, count - 1) * squares) / size


# ------------------------------------------------------------------------------------------------------------ commands


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def job_of(record: dict[str, Any]) -> Job:
    return Job(**record["job"])


def named(text: str, known: dict[str, str]) -> tuple[str, str]:
    """Name and overrides of what ``text`` stands for: a known name, or a name of one's own, a colon and overrides."""
    name, colon, own = text.partition(":")
    if not colon and name not in known:
        raise SystemExit(f"{name}: not known; give one of {', '.join(known)}, or NAME: OVERRIDES")
    return name.strip(), own.strip() if colon else known[name]


def run(arguments: argparse.Namespace) -> None:
    done = read(arguments.out)
    jobs = []
    for text, size, corpus in itertools.product(arguments.recipes, arguments.sizes, arguments.corpora):
        name, words = named(text, RECIPES)
        steps = _equal_time_steps(done, name, size, corpus, arguments) if arguments.as_long_as else arguments.steps
        for rate, seed in itertools.product(arguments.rates or [None], arguments.seeds):
            given = words if rate is None else f"{words} learning_rate={rate:g}"
            budget = f"{arguments.steps} steps of {arguments.as_long_as}" if arguments.as_long_as else ""
            jobs.append(Job(name, given, size, corpus, seed, steps, arguments.precision, budget))
    run_jobs(jobs, arguments.out, arguments.jobs)


def run_jobs(jobs: Sequence[Job], out: Path, at_once: int, device: str = "cpu") -> None:
    """Run what ``out`` does not have yet, each in a process of one thread; adds a line for each."""
    known = {job_of(record).key for record in read(out) if "job" in record}
    prose(Path(tempfile.gettempdir()))  # once, before several processes want it

    def one(job: Job) -> None:
        command = [sys.executable, __file__, "one", json.dumps(asdict(job)), "--device", device]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ended.returncode:
            print(f"{job.recipe} seed {job.seed} failed:\n{ended.stderr[-2000:]}", file=sys.stderr, flush=True)
            return
        result = json.loads(ended.stdout.splitlines()[-1])
        with out.open("a") as file:
            file.write(json.dumps({"job": asdict(job), **result}) + "\n")
        print(
            f"{job.recipe:20} {job.size:5} {job.corpus:6} seed {job.seed:3} rate {job.rate:.1e} steps {job.steps}: "
            f"{result['nats_per_byte']:.4f} nats per byte, {result['seconds']:.0f} s",
            flush=True,
        )

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, [job for job in jobs if job.key not in known]))


def _equal_time_steps(done: list[dict[str, Any]], name: str, size: str, corpus: str, arguments: Any) -> int:
    """Steps of ``name`` in the time of ``--as-long-as``'s ``--steps``, from the times this processor took so far."""

    def second_per_step(recipe: str) -> float:
        times = [
            record["seconds"] / record["job"]["steps"]
            for record in done
            if (record["job"]["recipe"], record["job"]["size"], record["job"]["corpus"]) == (recipe, size, corpus)
            and record.get("processor") == processor_name()
        ]
        if not times:
            raise SystemExit(
                f"--as-long-as: no run of {recipe} at {size} on {corpus} by this processor in {arguments.out} yet; "
                "run it first"
            )
        return statistics.median(times)

    return round(arguments.steps * second_per_step(arguments.as_long_as) / second_per_step(name))


def table(arguments: argparse.Namespace) -> None:
    """Every recipe at its best rate beside ``--base`` at its own, with as many tokens or in as much time; and what
    ``--base`` needs to reach the loss of each."""
    cells: dict[tuple[Any, ...], dict[tuple[str, float], dict[int, dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    records = read(arguments.out)
    timed_on = statistics.mode([record["processor"] for record in records if "processor" in record] or [""])
    for record in records:
        job = job_of(record)
        if job.precision == arguments.precision:
            processor = record.get("processor", "")
            # in equal time every run has the steps that fitted by the times there were
            budget = (0, job.as_long_as, processor) if job.as_long_as else (job.steps, "", "")
            cells[job.size, job.corpus, *budget][job.recipe, job.rate][job.seed] = record
            if processor == timed_on:
                times[job.size, job.corpus, *budget, job.recipe].append(record["seconds"])
    rows, claims = [], Claims()
    curves: dict[tuple[str, str], dict[str, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for cell in sorted(cells, key=lambda cell: (*_place(*cell[:2]), cell[3:], cell[2])):
        size, corpus, _, as_long_as, _ = cell
        best = _at_best_rates(cells[cell], arguments.fresh)
        against, base = arguments.base, best.get(arguments.base, {})
        if as_long_as:  # "400 steps of plain"
            others, _, _, against = as_long_as.split()
            base = _at_best_rates(cells[size, corpus, int(others), "", ""], arguments.fresh).get(against, {})
        for name, runs in sorted(best.items(), key=lambda item: _mean(item[1])):
            jobs = [job_of(record) for record in runs.values()]
            fewest, most = min(job.steps for job in jobs), max(job.steps for job in jobs)
            steps = f"{most}" if fewest == most else f"{fewest}-{most}"
            tokens = statistics.mean(record["tokens"] for record in runs.values())
            tried = sorted(rate for each, rate in cells[cell] if each == name)
            found, theirs = (
                {seed: record["nats_per_byte"] for seed, record in each.items()}
                for each in (runs, {} if name == against else base)
            )
            spread = f"{statistics.stdev(r['nats_per_byte'] for r in runs.values()):.3f}" if len(runs) > 1 else ""
            error = statistics.mean(record["standard_error"] for record in runs.values())
            seconds = statistics.median(times[*cell, name]) if times[*cell, name] else math.nan
            rows.append(
                [size, corpus, f"{steps}, as long as {as_long_as}" if as_long_as else steps, name, f"{jobs[0].rate:g}",
                 " ".join(f"{rate:g}" for rate in tried),
                 " ".join(map(str, sorted(runs))), f"{_mean(runs):.3f}", spread, f"{error:.3f}", against,
                 *claims.made(found, theirs), f"{seconds:.0f}".replace("nan", "")]
            )  # fmt: skip
            if name == arguments.base or not as_long_as:
                curves[size, corpus][name].append((tokens, _mean(runs), seconds))
    claims.correct(rows, 12)
    names = "size, corpus, steps, recipe, rate, rates tried, seeds, nats per byte, spread, error over documents"
    print_table(f"{names}, minus, difference ± 95 %, p (Holm), s of one core".split(", "), rows)
    reached = []
    for place, recipes in curves.items():
        if not (own := sorted(recipes.pop(arguments.base, []))):
            continue
        paces = [seconds / tokens for tokens, _, seconds in own if math.isfinite(seconds)]
        second_per_token = statistics.median(paces or [math.nan])
        for name, points in recipes.items():
            for tokens, loss, seconds in points:
                bound, needed = _tokens_to_reach(loss, own)
                time = needed * second_per_token
                texts = f"{needed / 1e6:.2f} M", f"{needed / tokens:.2f}", f"{time:.0f}", f"{time / seconds:.2f}"
                shown = ("" if "nan" in text else bound + text for text in texts)
                reached.append([*place, name, f"{tokens // 2048:.0f}", f"{loss:.3f}", *shown])
    print(f"\nWhat {arguments.base} needs for the loss of the others, between complete runs:\n")
    columns = "size, corpus, recipe, steps, nats per byte, tokens, share of tokens, s of one core, share of time"
    print_table(columns.split(", "), reached)


def _place(size: str, corpus: str) -> tuple[bool, int]:
    """Where a size and a corpus come in tables and pictures."""
    return corpus != "stdlib", list(SIZES).index(size)


def _at_best_rates(
    recipes: dict[tuple[str, float], dict[int, dict[str, Any]]], fresh: int
) -> dict[str, dict[int, dict[str, Any]]]:
    """Of each recipe the runs at the rate that did best with seeds below ``fresh``: those with other seeds, if any."""
    best: dict[str, tuple[float, dict[int, dict[str, Any]]]] = {}
    for (name, _), runs in recipes.items():
        tuned = {seed: record for seed, record in runs.items() if seed < fresh}
        mean = _mean(tuned) if tuned else math.inf
        if name not in best or mean < best[name][0]:
            best[name] = mean, {seed: record for seed, record in runs.items() if seed >= fresh} or runs
    return {name: runs for name, (_, runs) in best.items()}


def _tokens_to_reach(loss: float, points: Sequence[tuple[float, float, float]]) -> tuple[str, float]:
    """Between two complete runs, of which each decayed to its own end: over the logarithm of the tokens, a line.

    ``points`` are (tokens, loss, seconds), shortest first. Where ``loss`` is not between two of them the sign of the
    bound comes first: "<" with the tokens of the shortest run, ">" with those of the longest.
    """
    if loss >= points[0][1]:
        return "<", points[0][0]
    for (few, above, _), (many, below, _) in itertools.pairwise(points):
        if above >= loss > below:
            return "", few * (many / few) ** ((above - loss) / (above - below))
    return ">", points[-1][0]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def _mean(runs: dict[int, dict[str, Any]]) -> float:
    return statistics.mean(record["nats_per_byte"] for record in runs.values())


class Claims:
    """Pairs of entries that one table compares by runs with equal seeds: Student's t-test, Holm's correction."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def made(self, found: Mapping[int, float], base: Mapping[int, float]) -> tuple[str, int | None]:
        """By seeds: the mean difference, with its 95 % interval if there are two; and the claim, for ``correct``."""
        pairs = [found[seed] - base[seed] for seed in sorted(found.keys() & base.keys())]
        if len(pairs) < 2:
            return "".join(f"{each:+.3f}" for each in pairs), None
        self._values.append(paired_t(pairs))
        return f"{statistics.mean(pairs):+.3f} ± {half_interval(pairs):.3f}", len(self._values) - 1

    def correct(self, rows: Sequence[list[Any]], column: int) -> None:
        """Put the corrected p-values of all claims in place of the claims."""
        corrected = holm(self._values)
        for row in rows:
            row[column] = "" if row[column] is None else f"{corrected[row[column]]:.2g}"


def paired_t(differences: Sequence[float]) -> float:
    """Two-sided p of Student's t-test of the mean of paired differences, of which there are two at least.

    The tail beyond t, over the angle atan(t / sqrt(n)), in which the density is a power of a cosine: Simpson's rule.
    """
    spread, n = statistics.stdev(differences), len(differences) - 1
    t = math.inf if spread == 0 else abs(statistics.mean(differences)) * math.sqrt(n + 1) / spread
    low, pieces = math.atan(t / math.sqrt(n)), 2000
    width = (math.pi / 2 - low) / pieces
    weights = [1, *[4, 2] * (pieces // 2 - 1), 4, 1]
    area = sum(w * max(0.0, math.cos(low + k * width)) ** (n - 1) for k, w in enumerate(weights)) * width / 3
    return 2 * area * math.gamma((n + 1) / 2) / (math.sqrt(math.pi) * math.gamma(n / 2))


def half_interval(differences: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean of paired differences: where Student's t-test finds p = 0.05."""
    mean, low, high = statistics.mean(differences), 0.0, 1e3 * statistics.stdev(differences)
    for _ in range(60):
        middle = (low + high) / 2
        beyond = paired_t([each - mean + middle for each in differences]) < 0.05
        low, high = (low, middle) if beyond else (middle, high)
    return high


def holm(values: Sequence[float]) -> list[float]:
    """Holm's (1979) correction of p-values for several claims at once."""
    corrected, reached = [0.0] * len(values), 0.0
    for place, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        reached = max(reached, min(1.0, (len(values) - place) * values[index]))
        corrected[index] = reached
    return corrected


def plot(arguments: argparse.Namespace) -> None:
    """Loss over the learning rate at equal tokens, a line for each recipe, a panel for each size and corpus."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for record in read(arguments.out):
        job = job_of(record)
        if job.steps == arguments.steps and not job.as_long_as:
            panels[job.size, job.corpus][job.recipe].setdefault(job.rate, []).append(record["nats_per_byte"])
    across = (len(panels) + 1) // 2
    figure, axes = pyplot.subplots(2, across, figsize=(4.5 * across, 7.5), squeeze=False)
    cells = sorted(panels.items(), key=lambda item: _place(*item[0]))
    names = sorted({name for _, recipes in cells for name in recipes})
    for axis in axes.flat[len(cells) :]:
        axis.set_axis_off()
    for axis, ((size, corpus), recipes) in zip(axes.flat, cells, strict=False):
        for n, name in enumerate(names):
            points = recipes.get(name, {})
            rates = sorted(points)
            axis.plot(rates, [statistics.mean(points[r]) for r in rates], marker="o", color=f"C{n}", label=name)
        axis.set(title=f"{size}, {corpus}", xscale="log", xlabel="learning rate", ylabel="nats per byte, held out")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=len(names))
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(arguments.picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("recipes", nargs="+")
    runner.add_argument("--sizes", nargs="+", default=["tiny"], choices=list(SIZES))
    runner.add_argument("--corpora", nargs="+", default=["stdlib"], choices=CORPORA)
    runner.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    runner.add_argument("--rates", type=float, nargs="+", default=[])
    runner.add_argument("--steps", type=int, default=400)
    runner.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    runner.add_argument("--jobs", type=int, default=2)
    runner.add_argument("--as-long-as", default=None, metavar="RECIPE")
    tabulator = commands.add_parser("table")
    tabulator.add_argument("--base", default="default")
    tabulator.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    tabulator.add_argument("--fresh", type=int, default=11, help="no rate is chosen by seeds from here on")
    painter = commands.add_parser("plot")
    painter.add_argument("picture", type=Path)
    painter.add_argument("--steps", type=int, default=400)
    runner.add_argument("--out", type=Path, default=Path("quality.jsonl"))
    for each in (tabulator, painter):
        each.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    for name in ("one", "train"):
        commands.add_parser(name).add_argument("job", type=json.loads)
    commands.choices["train"].add_argument("folder", type=Path)
    commands.choices["one"].add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    if arguments.command == "one":
        print("\n" + json.dumps(run_one(Job(**arguments.job), arguments.device)))
    elif arguments.command == "train":
        train(Job(**arguments.job), arguments.folder)
    else:
        {"run": run, "table": table, "plot": plot}[arguments.command](arguments)


if __name__ == "__main__":
    main()
