"""Settings given explicitly that nothing will read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from forgather_cli.config.evaluation_limits import void_without_evaluation
from forgather_cli.config.hf_limits import void_in_hf
from forgather_cli.config.model_limits import void_in_model
from forgather_cli.config.paths import typed_value
from forgather_cli.config.schema import (
    Config,
    DataOption,
    DDPSettings,
    HfSettings,
    InfiniteSettings,
    InstructSettings,
    PipelineSettings,
    SingleSettings,
    Target,
    TextSettings,
    TokensSettings,
)

_SEVERAL_RANKS = (
    "nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "max_restarts",
    "replication_check",
)  # fmt: skip
"""Settings that only a job of several ranks reads."""
_DISPATCH = ("dispatch_batches", "dispatch_eval_batches")


def unread(config: Config, layers: Mapping[str, int]) -> Iterator[str]:
    """One problem for each path of ``layers`` that nothing reads, with the cause and the remedy.

    ``layers``: how late a path was set. What a later setting makes void is no mistake.
    """
    told: set[str] = set()
    for path, because, remedy in _void(config):
        since = max(layers.get(because, -1), layers.get(because.partition(".")[0], -1))
        for each in sorted(_topmost(path, layers) - told):
            if layers[each] >= since:
                told.add(each)
                name = each if each.startswith("callbacks.") else each.rpartition(".")[2]
                cause = f"{because.rpartition('.')[2]}={typed_value(config, because)}"
                yield f"{name}: nothing reads it with {cause}; {remedy} or leave {name} out"


def _topmost(path: str, given: Iterable[str]) -> set[str]:
    """The path if it was given, else those below it that were."""
    return {path} if path in given else {each for each in given if each.startswith(f"{path}.")}


def _void(config: Config) -> Iterator[tuple[str, str, str]]:
    """(setting, the setting that makes it void, what would make it count) for this config."""
    for kind, names in (
        ("logging", ("logging_steps", "logging_first_step")),
        ("eval", ("eval_steps",)),
        ("save", ("save_steps",)),
    ):
        if getattr(config, f"{kind}_strategy") != "steps":
            yield from ((name, f"{kind}_strategy", f"set {kind}_strategy=steps") for name in names)
    if config.save_strategy == "no":
        yield "eval_on_save", "save_strategy", "set save_strategy=steps"
    if config.max_steps > 0:
        yield "num_train_epochs", "max_steps", "set max_steps=-1"
    if not config.torch_compile:
        for name in ("backend", "mode", "dynamic", "fullgraph"):
            yield f"torch_compile_{name}", "torch_compile", "set torch_compile=true"
    yield from void_without_evaluation(config)
    yield from _void_resume(config)
    yield from _void_trainer(config)
    yield from _void_data(config)
    yield from void_in_model(config)
    scheduler = config.lr_scheduler
    if isinstance(scheduler, InfiniteSettings) and scheduler.anneal_start_step is None:
        start, remedy = "lr_scheduler.anneal_start_step", "set anneal_start_step to the step at which the anneal begins"
        yield from ((f"lr_scheduler.{name}", start, remedy) for name in ("anneal_steps", "min_lr_ratio"))


def _void_resume(config: Config) -> Iterator[tuple[str, str, str]]:
    resume = "resume_from_checkpoint"
    if config.resume_from_checkpoint is True and config.overwrite_output_dir:
        yield "overwrite_output_dir", resume, f"set {resume}=false"
    if config.resume_from_checkpoint is False:
        yield from ((name, resume, f"set {resume}=true") for name in ("resume_components", "ignore_data_skip"))


def _void_trainer(config: Config) -> Iterator[tuple[str, str, str]]:
    trainer = config.trainer
    if isinstance(trainer, SingleSettings):
        yield from ((name, "trainer", "choose trainer=ddp, fsdp2 or pipeline") for name in _SEVERAL_RANKS)
    if isinstance(trainer, DDPSettings):
        yield from _void_ddp(trainer)
    if isinstance(trainer, PipelineSettings) and trainer.split != "auto":
        yield from ((f"trainer.{end}_weight", "trainer.split", "set split=auto") for end in ("input", "output"))


def _void_ddp(trainer: DDPSettings) -> Iterator[tuple[str, str, str]]:
    local, unused = "trainer.post_local_sgd", "trainer.find_unused_parameters"
    if not trainer.post_local_sgd.enabled:
        for name in ("start_step", "period", "post_local_gradient_allreduce", "subgroup"):
            yield f"{local}.{name}", f"{local}.enabled", "set post_local_sgd.enabled=true"
    if not trainer.find_unused_parameters:
        yield "trainer.skip_all_reduce_unused_params", unused, "set find_unused_parameters=true"


def is_stream(data: DataOption) -> bool:
    """True if ranks cannot read the data by the numbers of its samples, or it is the user's and may be so."""
    return isinstance(data, Target) or (isinstance(data, HfSettings) and data.streaming)


def _void_data(config: Config) -> Iterator[tuple[str, str, str]]:
    data = config.data
    if not isinstance(data, Target) and data.tokenizer != "bpe":
        yield "data.bpe_vocab_size", "data.tokenizer", "set tokenizer=bpe"
    if isinstance(data, HfSettings):
        yield from void_in_hf(data)
    if isinstance(data, TextSettings | TokensSettings | InstructSettings) and data.eval_files:
        yield "data.eval_fraction", "data.eval_files", "leave eval_files out"
    if not is_stream(data):
        remedy = "ranks read its samples by number; give iterable data (data._target_, or data=hf with streaming=true)"
        yield from ((f"data.{name}", "data", remedy) for name in _DISPATCH)
    elif isinstance(config.trainer, SingleSettings):
        yield from ((f"data.{name}", "trainer", "choose trainer=ddp, fsdp2 or pipeline") for name in _DISPATCH)
