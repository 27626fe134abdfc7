"""Evaluation and prediction over one split, every example of which counts once; and which evaluation was the best."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from forgather_cli.callbacks.base import TrainerState
from forgather_cli.checkpoint.manifest import BestBy
from forgather_cli.config import schedule
from forgather_cli.config.schema import DataOption, RunSettings, typed
from forgather_cli.data.loaders.iterable import is_empty
from forgather_cli.distributed import all_sum, gather, on_rank_0, world
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.labels import SOURCES, UNITS, bytes_of, label_shift, num_targets, take_num_tokens
from forgather_cli.loss.base import Loss, NamedSums
from forgather_cli.loss.eval_metrics import EvalMetrics
from forgather_cli.models.parts import evaluation_mode
from forgather_cli.strategies.base import Batch, Strategy, without_targets
from forgather_cli.trainer.arguments import ScriptSettings
from forgather_cli.trainer.device_errors import explain_evaluation
from forgather_cli.trainer.run import TrainingRun
from forgather_cli.trainer.step_sync import StepSync, Sum

log = logging.getLogger(__name__)

_LOG_OF_MAX = math.log(sys.float_info.max)


_ASKING = (
    "eval_strategy", "eval_on_start", "eval_on_save", "load_best_model_at_end", "data.eval_files", "data.eval_split",
    "data.eval_fraction",
)  # fmt: skip
"""Settings by which a recipe or a command asks for evaluations, unless their values are empty."""


def has_samples(run: TrainingRun, dataset: Any) -> bool:
    """Collective. Whether there is something to evaluate on. Where there is not and evaluations would be due, that is
    told in one line; raises DataError where somebody has asked for them.
    """
    if not schedule.evaluates(run.config):
        return dataset is not None

    def look() -> bool:
        if not is_empty(dataset):
            return True
        if run.is_script:
            raise DataError("eval_dataset: has no samples; give it some, or set eval_strategy=no")
        nothing, given = run.config.data.nothing_held_out, run.run_dir.given()
        cause, remedy = (nothing.because, nothing.remedy) if nothing else nothing_to_read(run.config.data)
        values = {**vars(run.config), **{f"data.{name}": value for name, value in vars(run.config.data).items()}}
        asking = [name for name in _ASKING if name in given and values.get(name) not in ("no", False, None, [], 0.0)]
        if asking and nothing is None:  # else the rules have let it pass: a later layer has taken the split away
            who = "" if cause in asking else f", and {asking[0]} asks for evaluations"
            raise DataError(f"{cause}{who}; {remedy}, or leave {asking[0]} out")
        log.warning("nothing is evaluated: %s; %s", cause, remedy)
        return False

    return on_rank_0(look, run.cpu_group)


def nothing_to_read(data: DataOption) -> tuple[str, str]:
    """What to say of an option whose evaluation split is empty, and the remedy."""
    for name, remedy in (
        ("eval_files", "give files with some"),
        ("eval_split", "name a split with some"),
        ("eval_fraction", "raise it, or set data.eval_files"),
    ):
        if value := getattr(data, name, None):
            return f"data.{name}: leaves no sample to evaluate on, got {typed(value)}", remedy
    return f"data: the evaluation split of {data} has no samples", "have it return some"


class EvaluationStopped(Exception):
    """A stop was asked for; the unfinished evaluation is discarded."""


def in_rounds(batches: Iterable[Batch], group: Any, sync: StepSync | None = None) -> Iterator[tuple[Batch, bool]]:
    """Collective. (batch, True) until every rank of ``group`` has run out.

    A rank that has none left gets its last one without targets, and False: every pass through the model is collective
    under some strategies. Ranks agree on a round while the one before it is computed. A request to stop that ``sync``
    receives ends it. Raises EvaluationStopped then, and DataError for a rank that has no batch at all.
    """
    source = iter(batches)

    def fetch() -> tuple[Batch | None, Sum]:
        batch = next(source, None)
        return batch, Sum([int(batch is not None), *(sync.requests() if sync is not None else ())], group)

    ahead, agreement = fetch()
    last: Batch | None = None
    while True:
        ready, *requests = agreement.read()
        if sync is not None and sync.apply_requests(requests):
            raise EvaluationStopped
        if not ready:
            return
        if ahead is None and last is None:
            raise DataError("eval_dataset: has no batch for this rank, while others have; give it more samples")
        batch, counted = (ahead, True) if ahead is not None else (without_targets(last or {}), False)
        last = batch
        if group is not None:
            ahead, agreement = fetch()
            yield batch, counted
        else:
            yield batch, counted
            ahead, agreement = fetch()


def evaluate(
    strategy: Strategy,
    batches: Iterable[Batch],
    args: RunSettings,
    *,
    what: str,
    prefix: str,
    on_batch: Callable[[], None],
    group: Any,
    sync: StepSync | None = None,
    predictions: Predictions | None = None,
    run: TrainingRun | None = None,
    tasks: Tasks | None = None,
    token_bytes: torch.Tensor | None = None,
    minimised: Loss | None = None,
) -> dict[str, float]:
    """Collective. The mean loss over the targets (units) of a split; ``batches`` are this rank's, ``group`` is a CPU
    group of all ranks, and ``sync``: see ``in_rounds``. When it fails, the message names ``what`` and what it knows of
    ``run``.

    ``on_batch`` is called after each batch. The metrics carry ``prefix``: loss, perplexity (exp of loss, inf above the
    float range), tokens (without padding), targets (what the loss counts), runtime (seconds), samples_per_second.
    Without a target there is no loss, and no perplexity of one that is divided by other units. With ``token_bytes``
    (``labels.bytes_of``) also bits_per_byte, and with ``tasks`` loss and bits per byte of each task (denoiser).
    ``minimised``: the strategy's loss, which may have sums of its own. ``predictions`` keeps the logits of each batch,
    which takes a second forward; batches may then lack labels, and do not count in the metrics.
    """
    start = time.perf_counter()
    zeros = (torch.zeros((), dtype=torch.float64, device=strategy.device) for _ in range(5))
    loss_sum, unit_sum, target_sum, token_sum, byte_sum = zeros
    names = [f"loss/{name}" for name in getattr(getattr(batches, "dataset", None), "parts_by_source", ())]
    names += [] if minimised is None else minimised.names
    by_name = torch.zeros((2, len(names)), dtype=torch.float64, device=strategy.device)
    token_bytes = None if token_bytes is None else token_bytes.to(strategy.device)
    samples, has_labels, has_units = 0, False, False
    newest: list[Batch] = []
    here = world()
    try:
        with evaluation_mode(strategy.parts), adding_to(minimised, NamedSums(names, by_name)):
            for batch, counted in in_rounds(batches, group, sync):
                newest, (tokens, _), sources = [batch], take_num_tokens(batch), batch.pop(SOURCES, None)
                has_labels |= "labels" in batch
                if predictions is None or "labels" in batch:
                    loss, count = strategy.loss(batch)
                    loss_sum += loss
                    unit_sum += count
                    if has_units := UNITS in batch:
                        target_sum += num_targets(batch["labels"], label_shift(batch))
                    if sources is not None:  # all of one
                        by_name.index_add_(1, sources[0, :1], torch.stack([loss.double(), count.double()])[:, None])
                    if token_bytes is not None:
                        byte_sum += bytes_of(batch["labels"][:, label_shift(batch) :], token_bytes).sum()
                    if counted:
                        token_sum += tokens
                        samples += len(batch["input_ids"])
                if predictions is not None:
                    mean = loss / count if "labels" in batch and predictions.with_losses else None
                    predictions.add(batch, strategy.logits(batch), mean, counted=counted)
                on_batch()
        if not has_labels and predictions is not None:
            return {}
        sums = torch.stack([loss_sum, unit_sum, target_sum, token_sum, byte_sum, torch.full_like(loss_sum, samples)])
        sums = all_sum(torch.cat([sums, by_name.flatten()]), here.group)
        total, units, targets, tokens_seen, num_bytes, samples_seen, *named = sums.tolist()
    except Exception as error:
        explain_evaluation(error, what, newest, args, strategy, run)
        raise
    copies = here.size // strategy.data_size  # of each batch
    samples_seen, num_bytes = samples_seen / copies, num_bytes / copies
    seconds = time.perf_counter() - start
    targets = targets / copies if has_units else units
    metrics = {"tokens": int(tokens_seen) // copies, "targets": int(targets), "runtime": seconds}
    metrics["samples_per_second"] = samples_seen / seconds
    if units:
        mean_loss = total / units
        perplexity = {} if has_units else {"perplexity": math.exp(mean_loss) if mean_loss < _LOG_OF_MAX else math.inf}
        in_bits = {"bits_per_byte": total / math.log(2) / num_bytes} if num_bytes else {}
        pairs = zip(names, named, named[len(names) :], strict=False)
        by_its_name = {name: total / count for name, total, count in pairs if count}
        metrics = {"loss": mean_loss, **perplexity, **in_bits, **by_its_name, **metrics}
    else:
        log.warning("the %s split has no targets (every label is -100), and so no loss: check its labels", prefix)
    if tasks is not None:
        metrics |= tasks.read(here.group)
    return {f"{prefix}_{name}": value for name, value in metrics.items()}


@contextmanager
def adding_to(loss: Loss | None, sums: NamedSums | None) -> Iterator[None]:
    """Have a loss add to ``sums`` inside, and to those of the training again afterwards."""
    before = None if loss is None else loss.sums
    if loss is not None:
        loss.sums = sums if loss.names else None
    try:
        yield
    finally:
        if loss is not None:
            loss.sums = before


def token_bytes_of(tokenizer: Any, loss: Loss | None) -> torch.Tensor | None:
    """(V,) int64, on the CPU: the bytes of text that each token stands for. None where the tokenizer cannot tell, or
    the loss is no likelihood."""
    count = getattr(tokenizer, "bytes_of_tokens", None)  # a user's has none
    found = count() if count is not None and loss is not None and loss.is_likelihood else None
    return None if found is None else torch.from_numpy(found)


class Tasks:
    """The tasks of a split (a mixture's denoisers), by their names, as ``seen`` has counted them."""

    def __init__(self, names: Sequence[str], seen: EvalMetrics) -> None:
        self._names, self._seen = names, seen

    def read(self, group: Any) -> dict[str, float]:
        """Collective. ``loss_NAME`` and ``bits_per_byte_NAME`` of the tasks that had targets."""
        losses, targets, sizes = all_sum(self._seen.by_task.clone(), group).tolist()
        found: dict[str, float] = {}
        for name, loss, count, size in zip(self._names, losses, targets, sizes, strict=True):
            if count:
                found[f"loss_{name}"] = loss / count
            if size:
                found[f"bits_per_byte_{name}"] = loss / math.log(2) / size
        return found


@contextmanager
def tasks_of(
    loss: Loss | None, dataset: Any, token_bytes: torch.Tensor | None, device: torch.device
) -> Iterator[Tasks | None]:
    """What counts the tasks of a split while ``loss`` is asked inside; None where the split names no tasks."""
    names = getattr(dataset, "task_names", None)
    if loss is None or not names:
        yield None
        return
    before = loss.eval_metrics
    seen = before or EvalMetrics(device, token_bytes, len(names))
    loss.eval_metrics = seen
    try:
        yield Tasks(names, seen)
    finally:
        loss.eval_metrics = before


@dataclass
class PredictionOutput:
    """Logits (N, T, V) and labels (N, T) of a split on the CPU, and its metrics; Hugging Face's names."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] = field(default_factory=dict)


class EvalPrediction:
    """What ``compute_metrics`` gets, as Hugging Face's class of that name: arrays of a whole split, every example once.

    ``predictions`` (N, T, V), or what ``preprocess_logits_for_metrics`` makes of them, and ``label_ids`` (N, T), not
    shifted; with ``include_for_metrics`` also ``inputs`` (N, T) and ``losses`` (N,), each the mean of its batch.
    Unpacks in this order.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions, self.label_ids, self.inputs, self.losses = predictions, label_ids, inputs, losses
        self.elements = (predictions, label_ids, *(each for each in (inputs, losses) if each is not None))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]


class Predictions:
    """Keeps what the model says of a split, in host memory after every ``keep`` batches.

    ``preprocess(logits, labels)`` makes it smaller first: a tensor (B, ...).
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        preprocess: Callable[[Any, Any], Any] | None = None,
        with_inputs: bool = False,
        with_losses: bool = False,
        keep: int = 1,
    ) -> None:
        self._strategy, self._preprocess, self._keep = strategy, preprocess, keep
        self._with_inputs, self.with_losses = with_inputs, with_losses
        self._kept: list[dict[str, torch.Tensor]] = []

    @classmethod
    def of(cls, script: ScriptSettings, strategy: Strategy, preprocess: Any) -> Predictions | None:
        """As a script's arguments say; None where they want the loss alone."""
        if script.prediction_loss_only:
            return None
        wanted = script.include_for_metrics
        return cls(
            strategy,
            preprocess=preprocess,
            with_inputs="inputs" in wanted,
            with_losses="loss" in wanted,
            keep=script.eval_accumulation_steps or 1,
        )

    def add(self, batch: Batch, logits: Any, loss: Any, *, counted: bool) -> None:
        """A batch, its logits (None on ranks without the last layer) and its mean loss; not counted: one of padding."""
        if not counted or logits is None:
            return
        labels = batch.get("labels")
        if self._preprocess is not None:
            logits = self._preprocess(logits, labels)
            if not isinstance(logits, torch.Tensor):
                raise ConfigError(
                    "preprocess_logits_for_metrics: must return a tensor (B, ...), "
                    f"got a {type(logits).__name__}; stack what it returns"
                )
        found = {"predictions": logits.float() if logits.is_floating_point() else logits, "labels": labels}
        found["inputs"] = batch["input_ids"] if self._with_inputs else None
        found["losses"] = None if loss is None else loss.repeat(len(batch["input_ids"]))
        self._kept.append({name: tensor for name, tensor in found.items() if tensor is not None})
        if len(self._kept) % self._keep == 0:
            self._kept[-self._keep :] = [_on_host(each) for each in self._kept[-self._keep :]]

    def gathered(self, group: Any) -> dict[str, Any]:
        """Collective. Arrays of the whole split by name, on every rank; ``group``: a CPU group of all ranks."""
        shares = gather((self._strategy.data_rank, [_on_host(each) for each in self._kept]), group)
        held = {rank: kept for rank, kept in reversed(shares) if kept}  # by data rank: the first that has logits
        ordered = [each for rank in sorted(held) for each in held[rank]]
        names = ("predictions", "labels", "inputs", "losses")
        return {name: _stack([each[name] for each in ordered if name in each]) for name in names}


def _on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def users_metrics(compute: Callable[[Any], dict[str, Any]], arrays: dict[str, Any], prefix: str) -> dict[str, float]:
    """What ``compute_metrics`` says of a split, as plain numbers whose names begin with ``prefix``."""
    told = compute(EvalPrediction(arrays["predictions"], arrays["labels"], arrays["inputs"], arrays["losses"]))
    if not isinstance(told, dict):
        raise ConfigError(f"compute_metrics: must return a dict of numbers, got a {type(told).__name__}; return one")
    named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in told.items()}
    return {name: value.item() if hasattr(value, "item") else value for name, value in named.items()}


def _stack(chunks: list[torch.Tensor]) -> Any:
    """One array; batches of other lengths are padded with -100 on the right, as Hugging Face does."""
    if not chunks:
        return None
    if chunks[0].ndim > 1:
        longest = max(chunk.shape[1] for chunk in chunks)
        after = (0, 0) * (chunks[0].ndim - 2)  # torch's padding begins with the last dimension
        chunks = [F.pad(chunk, (*after, 0, longest - chunk.shape[1]), value=-100) for chunk in chunks]
    return torch.cat(chunks).numpy()


# ------------------------------------------------------------------------------------------------------ the best one


def track_best(args: RunSettings, state: TrainerState, metrics: dict[str, float]) -> None:
    """Note the step of an evaluation that is better than those before. What is no finite number is not the best."""
    value = BestBy(args.metric_for_best_model, args.greater_is_better).value(metrics)
    if value is None:
        return
    best = state.best_metric
    if best is None or (value > best if args.greater_is_better else value < best):
        state.best_metric, state.best_global_step = value, state.global_step


def agree_on_best(args: RunSettings, state: TrainerState, metrics: dict[str, float], group: Any) -> None:
    """Collective. Give all ranks rank 0's best evaluation: a callback may have added to the metrics of rank 0 alone.

    Raises ConfigError, on all ranks, where an evaluation lacks the metric of the best model: ``load_best_model_at_end``
    and ``save_strategy=best`` need it of each, else one of those so far must have had it. Without targets there is no
    loss, which ends only a run that needs it.
    """
    metric, step = args.metric_for_best_model, state.global_step
    needs = "load_best_model_at_end=false" if args.load_best_model_at_end else ""
    needs = needs or ("save_strategy=steps" if args.save_strategy == "best" else "")
    mine = (list(metrics), state.best_metric, state.best_global_step)
    found, state.best_metric, state.best_global_step = gather(mine, group)[0]
    if metric in found or f"eval_{metric}" in found or (state.best_metric is not None and not needs):
        return
    if metric.removeprefix("eval_") in ("loss", "perplexity"):
        if not needs:
            return
        raise ConfigError(
            f"metric_for_best_model: the evaluation at step {step} has no {metric}, since it has no targets (every "
            f"label is -100); mend the labels of the evaluation split, or set {needs}"
        )
    names = ", ".join(name for name in found if name != "epoch")
    raise ConfigError(
        f"metric_for_best_model: the evaluation at step {step} has no {metric}; set it to one that it has ({names}), "
        f"or {needs or 'leave it out'}"
    )
