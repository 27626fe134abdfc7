#!/usr/bin/env python3
"""How much of one GPU training uses, and where the rest goes: rows that add one setting after another.

    scripts/bench/gpu.py run [--rows 160m,160m-64] [--minutes 9]   # called again it does what is left
    scripts/bench/gpu.py tables                                    # what was found, as Markdown

Each row is a process of its own, forked from one that has imported torch, and trains on our own path (the trainer, its
step, its optimizer) with made-up data; ``plain`` rows are a loop of plain PyTorch compiled whole, ``hf`` rows
transformers' Trainer with liger. A result is appended to --out at once; what stands there is not measured again unless
it failed. A row whose setting this version does not have is recorded as "not there".

Rows that show how it was before ("before") run the package in --before, if that folder is there:
    mkdir -p build/before && git archive COMMIT forgather_cli conf recipes | tar -x -C build/before

Steps are timed by CUDA events without waiting for the device in between. MFU: 6 N (without the input embedding's
look-ups), and with 12 L H T of attention beside it, as PaLM counts. Shares are of a step's time, by the names of the
kernels of two more steps. Without a GPU all rows run on tiny shapes, to show that they do.
Machines without network: the wheels of ``scripts/gpu_check prepare`` are installed aside first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu_bench.jsonl"
BEFORE = ROOT / "build" / "before"


@dataclass(frozen=True)
class Shape:
    words: tuple[str, ...]
    seq_len: int
    batch: int
    """Sequences of a step."""
    micro: int = 0
    """Sequences of a micro-batch where the device has 80 GB; 0, or with more memory: all."""
    warm: int = 4
    timed: int = 8


SHAPES = {
    "160m": Shape(("model=160m", "model.vocab_size=50304"), 1024, 16, warm=6, timed=16),
    "160m-64": Shape(("model=160m", "model.vocab_size=50304"), 1024, 64),
    "1b": Shape(("model=1b", "model.vocab_size=128256"), 2048, 16, micro=8),
    "chats": Shape(("model=160m", "model.vocab_size=50304"), 4096, 4, warm=6, timed=12),
    "8b": Shape(
        ("model=decoder", "model.hidden_size=4096", "model.intermediate_size=14336", "model.num_hidden_layers=32",
         "model.num_attention_heads=32", "model.num_key_value_heads=8", "model.vocab_size=128256",
         "model.rope_theta=500000"), 4096, 2,
    ),
}  # fmt: skip
TINY = Shape(("model=nano", "model.vocab_size=512"), 128, 4, micro=2, warm=2, timed=3)


@dataclass(frozen=True)
class Row:
    shape: str
    words: tuple[str, ...] = ()
    runner: str = "forgather"
    before: bool = False
    """Of the package in --before, where it is there."""
    ordered: bool = True
    """False: attention's kernels in torch's own order."""
    else_words: tuple[str, ...] = ()
    """Once more with these where memory was not enough."""


BLOCKS = ("torch_compile=true", "torch_compile_scope=blocks")
WHOLE = ("torch_compile=true", "torch_compile_scope=model")
STREAM = (*WHOLE, "precision.stream=bf16")
COMPILED = ("torch_compile=true",)  # in the scope that this version takes by itself
CHATS = ("data=instruct", "data.chat_template=chatml", "tokenizer=bytes")
LORA = ("adapter=lora", "learning_rate=1e-4", *COMPILED)


def chain(shape: str, name: str) -> dict[str, Row]:
    """One setting after another."""
    return {
        f"{name}-loss": Row(shape, BLOCKS, ordered=False),
        f"{name}-model": Row(shape, WHOLE, ordered=False),
        f"{name}-kernels": Row(shape, WHOLE),
        f"{name}-stream": Row(shape, STREAM),
    }


ROWS = {
    "160m": Row("160m", COMPILED, before=True),
    "160m-64": Row("160m-64", COMPILED, before=True),
    **chain("160m-64", "160m"),
    "1b": Row("1b", COMPILED, before=True),
    **chain("1b", "1b"),
    "chats-whole": Row("chats", (*CHATS, *COMPILED, "data.isolate_documents=false")),
    "chats": Row("chats", (*CHATS, *COMPILED)),
    "chats-dense": Row("chats", (*CHATS, *COMPILED), before=True),
    "8b-lora": Row("8b", LORA, else_words=("gradient_checkpointing=true",)),
    "muon": Row("160m-64", (*COMPILED, "optimizer=muon")),
    "fp8": Row("1b", (*COMPILED, "precision=fp8")),
    "plain-160m": Row("160m-64", runner="plain"),
    "plain-1b": Row("1b", runner="plain"),
    "hf-160m": Row("160m-64", runner="hf"),
    "hf-160m-compiled": Row("160m-64", runner="hf-compiled"),
    "hf-1b": Row("1b", runner="hf"),
    "160m-16": Row("160m", STREAM),
}
WHAT = {
    "160m": "160m, 16 x 1,024, blocks compiled, as it was", "160m-64": "64 x 1,024", "160m-loss": "+ compiled loss",
    "160m-model": "+ whole model", "160m-kernels": "+ kernels in order", "160m-stream": "+ bf16 stream",
    "1b": "1b, 16 x 2,048, blocks compiled, as it was", "1b-loss": "+ compiled loss", "1b-model": "+ whole model",
    "1b-kernels": "+ kernels in order", "1b-stream": "+ bf16 stream",
    "chats-whole": "160m, 4 x 4,096 without borders", "chats": "chats, documents apart",
    "chats-dense": "chats, documents apart, as it was", "8b-lora": "Llama 3 8B, LoRA, 2 x 4,096",
    "muon": "160m, 64 x 1,024, Muon", "fp8": "1b, fp8", "plain-160m": "160m, plain PyTorch compiled whole",
    "plain-1b": "1b, plain PyTorch compiled whole", "hf-160m": "160m, transformers' Trainer, liger",
    "hf-160m-compiled": "the same, compiled", "hf-1b": "1b, transformers' Trainer, liger",
    "160m-16": "160m, 16 x 1,024, all of it",
}  # fmt: skip

# -------------------------------------------------------------------------------------------- where a step's time goes

KINDS = (  # the first that matches a kernel's name
    ("copy", r"^mem(cpy|set)|copy_kernel|copy_device"),
    ("attention", r"flash|fmha|sdpa|attention|varlen|mha_"),
    ("loss", r"log_?softmax|nll_loss|cross_entropy|cunn_SoftMax|cce_|logsumexp"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|_mm\b|triton_mm|scaled_mm|mkldnn|aten::(addmm|mm|bmm)"),
    ("optimizer", r"multi_tensor|adam|muon|lpnorm|foreach"),
    ("reduction", r"reduce|triton_(red|per)_|norm|softmax|scan"),
    ("elementwise", r"triton_|elementwise|vectorized|unrolled|index|embedding|catarray|gather|scatter|fill|aten::"),
)  # fmt: skip


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def shares(kernels: list[tuple[str, float, float]], steps: int, step_us: float) -> dict[str, Any]:
    """Of kernels (name, start, end, in us) of ``steps`` steps: shares of a step of ``step_us``, and the longest."""
    by_kind: dict[str, float] = {}
    by_name: dict[str, float] = {}
    for name, start, stop in kernels:
        by_kind[kind_of(name)] = by_kind.get(kind_of(name), 0.0) + stop - start
        by_name[name] = by_name.get(name, 0.0) + stop - start
    whole = steps * step_us
    idle = max(0.0, 1 - busy((start, stop) for _, start, stop in kernels) / whole)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:15]
    return {
        "shares": {**{kind: round(us / whole, 4) for kind, us in by_kind.items()}, "idle": round(idle, 4)},
        "longest": [[name[:100], round(us / whole, 4)] for name, us in longest],
        "attention": sorted({name[:100] for name, _, _ in kernels if kind_of(name) == "attention"}),
        "kernels": round(len(kernels) / steps),
    }


class Clock:
    """Told of each step's end: times steps after ``warm`` of them, then has two more profiled."""

    PROFILED = 2

    def __init__(self, device: str, warm: int, timed: int) -> None:
        self.cuda, self.warm, self.timed = device == "cuda", warm, timed
        self.steps = warm + timed + self.PROFILED
        self.marks: list[Any] = []
        self.found: dict[str, Any] = {}
        self.began = time.perf_counter()

    def step(self) -> None:
        import torch

        number = len(self.marks) + 1
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        if number == 1:
            self.wait()
            self.found["first_step"] = round(time.perf_counter() - self.began, 1)
        elif number == self.warm:
            self.graphs = self.counted()
        elif number == self.warm + self.timed:
            self.wait()
            self.report()
            activity = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(activities=[activity.CUDA if self.cuda else activity.CPU])
            self.profiler.start()
        elif number == self.steps:
            self.wait()
            self.profiler.stop()
            self.found |= shares(self.kernels(), self.PROFILED, self.found["ms"] * 1e3)

    def wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    @staticmethod
    def counted() -> tuple[int, int]:
        """Graphs that were compiled, and breaks between them."""
        counters = sys.modules["torch._dynamo.utils"].counters if "torch._dynamo.utils" in sys.modules else {}
        return counters.get("stats", {}).get("unique_graphs", 0), sum(counters.get("graph_break", {}).values())

    def report(self) -> None:
        pairs = list(zip(self.marks[self.warm - 1 :], self.marks[self.warm :], strict=False))
        times = [a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in pairs]
        graphs, breaks = self.counted()
        self.found |= {"ms": statistics.median(times), "slowest": round(max(times), 2), "graphs": graphs,
                       "recompiled": graphs - self.graphs[0], "breaks": breaks}  # fmt: skip
        if self.cuda:
            import torch

            self.found["memory"] = torch.cuda.max_memory_allocated() / 2**30  # the last log begins it anew

    def kernels(self) -> list[tuple[str, float, float]]:
        from torch.autograd import DeviceType

        events = [e for e in self.profiler.events() if not getattr(e, "is_user_annotation", False)]
        if self.cuda:
            return [(e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA
                    and not re.match(r"Optimizer\.|ProfilerStep|## |Activity Buffer", e.name)]  # fmt: skip
        return [(e.name, e.time_range.start, e.time_range.start + e.self_cpu_time_total) for e in events]


# ---------------------------------------------------------------------------------------------------------- one row


class NotThere(Exception):
    """This version lacks what the row is about."""


def measure(name: str, device: str, before: str, *more: str) -> dict[str, Any]:
    """In a process of its own, which has not imported the package yet. ``more``: words that win over the row's."""
    row = ROWS[name]
    shape = SHAPES[row.shape] if device == "cuda" else TINY
    tree = Path(before) if row.before and (Path(before) / "forgather_cli").is_dir() else ROOT
    sys.path.insert(0, str(tree))
    os.chdir(tempfile.mkdtemp())
    if not row.ordered:
        in_torchs_order()
    if device == "cuda":
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()  # its processes start while the model is built
    import torch

    from forgather_cli.models.build import build_model

    micro = shape.batch
    if device == "cpu" or torch.cuda.get_device_properties(0).total_memory < 100e9:
        micro = shape.micro or shape.batch
    clock = Clock(device, shape.warm, shape.timed)
    words = {
        word.partition("=")[0]: word for word in (
            *shape.words, f"seq_len={shape.seq_len}", f"global_batch_size={shape.batch}",
            f"per_device_train_batch_size={micro}", "data=synthetic", "precision=bf16", "optimizer=adamw",
            "learning_rate=2e-3", "lr_scheduler=constant", f"max_steps={clock.steps}", "eval_strategy=no",
            "save_strategy=no", "callbacks=minimal", "logging_steps=1000", "logging_first_step=false",
            f"device={device}", "construct_model_on=device", "output_dir=run", *row.words, *more,
        )
    }  # fmt: skip
    if words["data"] == "data=instruct":
        Path("chats.jsonl").write_text("".join(chats(2 * clock.steps * shape.batch * shape.seq_len)))
        words |= {"data.files": "data.files=[chats.jsonl]", "data.cache_dir": "data.cache_dir=cache"}
    if "adapter" in words:
        settings = settings_of(checked(shape.words, data="data=synthetic"), shape)
        empty_base(settings)
        words = {key: word for key, word in words.items() if not key.startswith("model")}
        words["model"] = "model=pretrained"
        words |= {"model.path": "model.path=base", "tokenizer": "tokenizer=bytes"}
        words["model.replace_tokenizer"] = "model.replace_tokenizer=true"
    if device == "cpu" and words.get("torch_compile") == "torch_compile=true":
        words["torch_compile_backend"] = "torch_compile_backend=aot_eager"
    config = checked(words.values())
    RUNNERS[row.runner](config, clock, shape, micro)
    with torch.device("meta"):
        flops = operations(config, build_model(config.model, vocab_size=257, seq_len=shape.seq_len))
    rate = shape.batch * shape.seq_len / clock.found["ms"] * 1e3
    found = {"tokens_per_second": round(rate), "micro": micro, "tree": "this" if tree == ROOT else "before"}
    if device == "cuda":
        from forgather_cli.callbacks.metrics import peak_flops

        if peak := peak_flops(torch.cuda.get_device_name(0), "bf16"):
            found |= {"mfu": flops[0] * rate / peak, "mfu_attention": sum(flops) * rate / peak}
    return {**clock.found, **found}


def checked(words: Iterable[str], **more: str) -> Any:
    """The config of these words, with nothing left for the machine to decide. Raises NotThere where one is unknown."""
    from forgather_cli.config.load import load_config
    from forgather_cli.errors import ConfigError

    try:
        config = load_config(None, [*words, *more.values()]).config
    except ConfigError as error:
        raise NotThere(str(error)) from error
    try:
        from forgather_cli.config.decided import decided
    except ImportError:  # an earlier version
        return config
    return decided(config)[0]


def settings_of(config: Any, shape: Shape) -> Any:
    """The decoder's settings with nothing left open."""
    import torch

    from forgather_cli.models.build import build_model

    with torch.device("meta"):
        return build_model(config.model, vocab_size=257, seq_len=shape.seq_len).settings


def operations(config: Any, model: Any) -> tuple[float, float]:
    """Of a token: 6 N, 4 N of what an adapter leaves frozen, and attention's."""
    from forgather_cli.trainer.metrics import Flops

    if config.adapter.type != "none":
        model.requires_grad_(False)
    flops = Flops.of([model])
    return flops.weights, flops.attention * config.data.seq_len


def chats(size: int) -> list[str]:
    """Lines of jsonl with about ``size`` bytes of text in conversations of 100 to 2,000 bytes."""
    import random

    draw, lines = random.Random(0), []
    while size > 0:
        lengths = draw.randint(30, 200), draw.randint(70, 1800)
        turns = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz     ", k=length)) for length in lengths]
        messages = [{"role": r, "content": text} for r, text in zip(("user", "assistant"), turns, strict=True)]
        lines.append(json.dumps({"messages": messages}) + "\n")
        size -= sum(lengths)
    return lines


def empty_base(settings: Any) -> None:
    """A model directory ``base`` whose weights, in bf16, are a hole in a file: drawn on the device once loaded."""
    import torch

    from forgather_cli.adapters import directory
    from forgather_cli.models.decoder import Decoder
    from forgather_cli.models.pretrained import hf_config

    with torch.device("meta"):
        model = Decoder(settings)
    header, end = {}, 0
    for name, p in model.state_dict().items():
        offsets = [end, end := end + 2 * p.numel()]
        header[name] = {"dtype": "BF16", "shape": list(p.shape), "data_offsets": offsets}
    written = json.dumps(header).encode()
    Path("base").mkdir()
    Path("base/config.json").write_text(json.dumps({**hf_config(settings), "torch_dtype": "bfloat16"}))
    with Path("base/model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)
    # not of 16 GB, which takes half a minute
    directory.base_of = lambda path: {"path": str(path), "name": path.name, "sha256": "0" * 64}


def in_torchs_order() -> None:
    """Let orders of attention's kernels that the package asks for change nothing."""
    import torch.nn.attention

    @contextlib.contextmanager
    def unchanged(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    torch.nn.attention.sdpa_kernel = unchanged


def forgather(config: Any, clock: Clock, shape: Shape, micro: int) -> None:
    import forgather_cli.callbacks.build as built
    from forgather_cli import worker
    from forgather_cli.callbacks.base import TrainerCallback
    from forgather_cli.run_dir import RunDir

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for p in kwargs["model"].parameters():
                if not p.requires_grad:  # of ``empty_base``
                    p.data.normal_(0, 0.02)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step()

    original = built.build_callbacks
    built.build_callbacks = lambda *args, **kwargs: [*original(*args, **kwargs), Steps()]
    worker.build(config, RunDir(Path(str(config.output_dir)))).train()


def random_tokens(clock: Clock, shape: Shape) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 257, (clock.steps, shape.batch, shape.seq_len), generator=generator)


def plain(config: Any, clock: Clock, shape: Shape, micro: int) -> None:
    """The same shape in some fifty lines, model and loss in one graph."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    s = settings_of(config, shape)
    width, heads, kv, head = s.hidden_size, s.num_attention_heads, s.num_key_value_heads, s.head_dim
    head = head or width // heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q_norm, self.k_norm = nn.RMSNorm(head), nn.RMSNorm(head)
            self.q = nn.Linear(width, heads * head, bias=False)
            self.k = nn.Linear(width, kv * head, bias=False)
            self.v = nn.Linear(width, kv * head, bias=False)
            self.o = nn.Linear(heads * head, width, bias=False)
            self.gate = nn.Linear(width, s.intermediate_size, bias=False)
            self.up = nn.Linear(width, s.intermediate_size, bias=False)
            self.down = nn.Linear(s.intermediate_size, width, bias=False)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            def turned(t: Tensor) -> Tensor:
                a, b = t.chunk(2, -1)
                return t * cos + torch.cat((-b, a), -1) * sin

            h = self.norm1(x)
            q, k, v = (f(h).unflatten(-1, (-1, head)).transpose(1, 2) for f in (self.q, self.k, self.v))
            q, k = turned(self.q_norm(q)).to(v.dtype), turned(self.k_norm(k)).to(v.dtype)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(a.transpose(1, 2).flatten(2))
            h = self.norm2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(s.vocab_size, width)
            self.blocks = nn.ModuleList(Block() for _ in range(s.num_hidden_layers))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, s.vocab_size, bias=False)
            if s.tie_word_embeddings:
                self.head.weight = self.embed.weight
            angles = torch.outer(torch.arange(shape.seq_len), s.rope_theta ** -(torch.arange(0, head, 2) / head))
            self.register_buffer("cos", angles.cos().repeat(1, 2))
            self.register_buffer("sin", angles.sin().repeat(1, 2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    on = "cuda" if clock.cuda else "cpu"
    with torch.device(on):
        model = Plain()
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.02)
    loss_of = torch.compile(model, backend="inductor" if clock.cuda else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), fused=True)
    for step in random_tokens(clock, shape):
        for batch in step.to(on, non_blocking=True).split(micro):
            with torch.autocast(on, torch.bfloat16):
                loss = loss_of(batch) * (micro / shape.batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()


def hf(config: Any, clock: Clock, shape: Shape, micro: int, *, compiled: bool = False) -> None:
    import torch
    import transformers

    s = settings_of(config, shape)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "rope_theta", "tie_word_embeddings", "vocab_size")  # fmt: skip
    llama = transformers.LlamaConfig(**{n: getattr(s, n) for n in names}, max_position_embeddings=shape.seq_len)
    with torch.device("cuda" if clock.cuda else "cpu"):
        model = transformers.LlamaForCausalLM(llama)

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step()

    args = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=clock.steps, per_device_train_batch_size=micro, bf16=True, learning_rate=2e-3,
        gradient_accumulation_steps=shape.batch // micro, lr_scheduler_type="constant", report_to=[],
        save_strategy="no", disable_tqdm=True, logging_steps=1000, use_cpu=not clock.cuda,
        use_liger_kernel=clock.cuda, torch_compile=compiled and clock.cuda,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(clock, shape).flatten(0, 1)]
    transformers.Trainer(model, args, train_dataset=rows, callbacks=[Steps]).train()


RUNNERS: dict[str, Callable[..., None]] = {
    "forgather": forgather, "plain": plain, "hf": hf,
    "hf-compiled": lambda *args: hf(*args, compiled=True),
}  # fmt: skip

# -------------------------------------------------------------------------------------------------------- processes


def device_there() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.is_available()
    if gpu:
        torch.ones(1, device="cuda")
    return {"name": torch.cuda.get_device_name(0) if gpu else NO_GPU, "gpu": gpu}


NO_GPU = "no GPU: tiny shapes"
WORK: dict[str, Callable[..., dict[str, Any]]] = {"device": device_there, "measure": measure}


def answer(to: str, work: str, *words: str) -> None:
    """Write what ``work`` finds, or how it ended, to a file."""
    try:
        found = {"result": "ok", **WORK[work](*words)}
    except NotThere as error:
        found = {"result": "not there", "detail": str(error).strip()}
    except BaseException as error:
        traceback.print_exc()
        memory = "out of memory" in str(error).lower()
        found = {"result": "failed", "memory_short": memory, "detail": f"{type(error).__name__}: {error}"[:1500]}
    Path(to).write_text(json.dumps(found))


def child(log: Path, deadline: float, *words: str, fork: bool = True) -> dict[str, Any]:
    """What ``answer`` writes in a process of its own, whose output goes to ``log``; without ``fork`` a bare one."""
    to = log.with_suffix(".json")
    to.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if not fork:
            os.execv(sys.executable, [sys.executable, __file__, "_answer", str(to), *words])
        answer(str(to), *words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"result": "failed", "detail": "no time was left"}
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # its compile workers
    if not to.exists():
        return {"result": "failed", "detail": "the process ended: " + log.read_text()[-1000:]}
    return dict(json.loads(to.read_text()))


def run(a: argparse.Namespace) -> int:
    deadline = time.monotonic() + a.minutes * 60
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(16, os.cpu_count() or 1)))
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # what asks for a GPU here leaves the forks theirs
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    if a.device != "cpu":
        import torch._dynamo
        import torch._inductor.compile_fx
        import transformers  # noqa: F401

    logs, before = a.logs.resolve(), str(a.before.resolve())
    logs.mkdir(parents=True, exist_ok=True)
    on, fork = {"name": NO_GPU, "gpu": False}, True
    if a.device != "cpu":
        on = child(logs / "device", deadline, "device")
        if "name" not in on:  # CUDA was touched before the fork
            fork = False
            on = child(logs / "device", deadline, "device", fork=False)
        if "name" not in on:
            raise SystemExit(f"the device does not answer: {on['detail']}")
    device = "cuda" if on["gpu"] else "cpu"
    print(f"{on['name']}; torch {torch.__version__}, Python {sys.version.split()[0]}, fork={fork}", flush=True)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["row"], *r["set"]) for r in read(a.out) if r["on"] == on["name"] and r["result"] == "ok"}
    left, failures = [], 0
    for name in a.rows.split(","):
        if (name, *a.set) in done:
            continue
        if time.monotonic() > deadline - 20:
            left.append(name)
            continue
        began = time.monotonic()
        record = {"on": on["name"], "torch": torch.__version__, "row": name, "set": a.set}
        found = child(logs / name, deadline, "measure", name, device, before, *a.set, fork=fork)
        if found.get("memory_short") and (more := ROWS[name].else_words):
            record["with"] = more
            found = child(logs / name, deadline, "measure", name, device, before, *more, *a.set, fork=fork)
        with a.out.open("a") as file:
            file.write(json.dumps({**record, **found, "seconds": round(time.monotonic() - began, 1)}) + "\n")
        failures += found["result"] == "failed"
        said = str(found.get("detail", "")).splitlines()
        print(f"{name:18}{time.monotonic() - began:4.0f} s  {found['result']:10}", end="")
        print(line(found) if found["result"] == "ok" else said[0][:300] if said else "", flush=True)
    if left:
        print(f"no time left for {', '.join(left)}; call it again")
    return 1 if failures else 75 if left else 0


def percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.1f} %"


def line(found: dict[str, Any]) -> str:
    shares = sorted(found["shares"].items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {percent(share)}" for kind, share in shares)
    mfu = f", MFU {percent(found['mfu'])}, with attention {percent(found['mfu_attention'])}" if "mfu" in found else ""
    memory = f", {found['memory']:.1f} GiB" if "memory" in found else ""
    graphs = f"{found['graphs']} graphs, {found['breaks']} breaks, {found['recompiled']} late"
    return (
        f"{found['tokens_per_second']:,} tokens/s, {found['ms']:.1f} ms{mfu}{memory}, first step after "
        f"{found['first_step']} s, {graphs}; {kinds}"
    )


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def tables(out: Path) -> None:
    newest = {(r["on"], r["row"]): r for r in read(out) if not r["set"]}
    kinds = [*(kind for kind, _ in KINDS), "other", "idle"]
    for on in dict.fromkeys(key[0] for key in newest):
        found = {name: newest[on, name] for name in ROWS if (on, name) in newest}
        print(f"**{on}**, torch {next(iter(found.values()))['torch']}\n")
        print("| | tokens/s | ms a step | 6 N | with attention | GiB | " + " | ".join(kinds) + " |")
        print("|---" * (6 + len(kinds)) + "|")
        for name, r in found.items():
            what = WHAT[name] + (f" ({r['micro']} at once)" if r["result"] == "ok" and "1b" in name else "")
            what += "".join(f", {word}" for word in r.get("with", ()))
            if r["result"] != "ok":
                said = (str(r.get("detail", "")).splitlines() or [""])[0][:120]
                print(f"| {what} | {r['result']}: {said} |" + " |" * (4 + len(kinds)))
                continue
            memory = f"{r['memory']:.1f}" if "memory" in r else ""
            columns = [what, f"{r['tokens_per_second']:,}", f"{r['ms']:.1f}", percent(r.get("mfu")),
                       percent(r.get("mfu_attention")), memory]  # fmt: skip
            print("| " + " | ".join([*columns, *(percent(r["shares"].get(kind)) for kind in kinds)]) + " |")
        rival = ["modded-nanogpt of 2024-10-18 on an H100, 124M, 64 x 1,024", "462,000", "141.9", "", "40 %", ""]
        print("| " + " | ".join([*rival, *("" for _ in kinds)]) + " |")
        for ours, theirs in (("chats", "chats-whole"), ("chats-dense", "chats-whole"), ("muon", "160m-kernels"),
                             ("160m-stream", "160m-64"), ("1b-stream", "1b"), ("fp8", "1b-kernels")):  # fmt: skip
            if all(found.get(n, {}).get("result") == "ok" for n in (ours, theirs)):
                print(f"\n{ours} takes {found[ours]['ms'] / found[theirs]['ms']:.3f} of the time of {theirs}.", end="")
        print("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure")
    running.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    running.add_argument("--minutes", type=float, default=8.8)
    running.add_argument("--device", choices=("cuda", "cpu"), help="without it: the GPU if there is one")
    running.add_argument("--before", type=Path, default=BEFORE, help="an earlier version's tree")
    running.add_argument("--logs", type=Path, default=OUT.parent / "gpu_bench_logs")
    running.add_argument("--wheels", type=Path)
    running.add_argument("--set", action="append", default=[], metavar="WORD", help="a setting of every row")
    showing = commands.add_parser("tables", help="what was found")
    for command in (running, showing):
        command.add_argument("--out", type=Path, default=OUT)
    if sys.argv[1:2] == ["_answer"]:
        return answer(*sys.argv[2:])
    a = parser.parse_args()
    if a.command == "tables":
        return tables(a.out)
    if unknown := [name for name in a.rows.split(",") if name not in ROWS]:
        parser.error(f"no such rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    loader = SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
    gpu_check = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules[loader.name] = gpu_check
    loader.exec_module(gpu_check)
    gpu_check.bootstrap(a.wheels or gpu_check.WHEELS)
    sys.exit(run(a))


if __name__ == "__main__":
    main()
