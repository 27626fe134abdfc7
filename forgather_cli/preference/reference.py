"""What the reference says of each pair: the model as it is at step 0, or another one.

It is computed once, before the first step, by the code that the policy goes through, and kept in the data cache:

    <cache_dir>/references/<key>/values    (pairs, 2) fp64: log-probabilities of the chosen and the rejected sides
    <cache_dir>/references/.tmp-<key>/     what ranks have computed so far, which a later start goes on with

The key is of the weights, the model's settings, the data with their template, and the precision.
Checkpoints have it with a checksum.

Legend: B rows, P pairs of a row at most.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather_cli.callbacks.norms import FullParameters
from forgather_cli.checkpoint.replication import checksums
from forgather_cli.config.schema import NoAdapter
from forgather_cli.data.cache import Cache, digest
from forgather_cli.data.loaders.collate import Batch, default_collate, microbatches
from forgather_cli.data.loaders.prefetch import to_device
from forgather_cli.data.samples import one_of
from forgather_cli.distributed import gather, on_rank_0
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import CheckpointError, DataError, ModelError
from forgather_cli.labels import LENGTHS, SOURCES
from forgather_cli.models.build import construct, directory_option, fill
from forgather_cli.models.parts import evaluation_mode
from forgather_cli.preference.rows import REFERENCE
from forgather_cli.strategies.base import Strategy
from forgather_cli.strategies.build import build_strategy
from forgather_cli.terminal.bars import Bar
from forgather_cli.trainer.build import known_vocab_size, model_spec, takes_starts
from forgather_cli.trainer.evaluate import EvaluationStopped, in_rounds
from forgather_cli.trainer.run import TrainingRun

log = logging.getLogger(__name__)

_RECORD = np.dtype([("pair", "<i8"), ("values", "<f8", 2)])


class PairsWithReference:
    """A dataset of pairs, whose batches have ``REFERENCE`` too."""

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "row_pairs"):
            raise DataError(
                f"loss=dpo: a {type(dataset).__name__} does not tell which pairs its rows have (num_pairs, max_pairs, "
                "row_pairs); set data=preference"
            )
        self._dataset = dataset
        self.values = torch.full((dataset.num_pairs, 2), torch.nan, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return one_of(self, index)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        many = getattr(self._dataset, "__getitems__", None)
        rows = many(indices) if many else [self._dataset[index] for index in indices]
        found = torch.full((len(indices), self._dataset.max_pairs, 2), torch.nan, dtype=torch.float64)
        for row, index in enumerate(indices):
            pairs = list(self._dataset.row_pairs(index))
            found[row, : len(pairs)] = self.values[pairs]
        return {**(default_collate(rows) if isinstance(rows, list) else rows), REFERENCE: found}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy in another process has nothing yet when it is asked for these
            raise AttributeError(name)
        return getattr(self._dataset, name)


def find_or_compute(loss: Any, loop: Any, reader: Any) -> None:
    """Collective. Fill in what the reference of ``loss``, a DPO, says of the loop's splits. ``reader``: the checkpoint
    that training goes on from. A stop signal leaves it unfinished, and ends training. Raises SetupError.
    """
    run: TrainingRun = loop.run
    cache, facts = Cache(getattr(run.config.data, "cache_dir", None)), run.data_description
    splits = {"train": loop.train_dataset, "eval": loop.eval_dataset}
    splits = {name: data for name, data in splits.items() if data is not None and len(data)}
    known: dict[str, Any] = {}
    if reader is not None and run.state.global_step:
        saved = reader.identity().get("data") or {}
        known = saved.get("reference") or {}
        if not known or known["path"] != loss.reference or saved.get("fingerprint") != facts.get("fingerprint"):
            raise CheckpointError(
                f"loss=dpo: {reader.path} is of a run that did not compare these pairs with this reference, and the "
                "model at step 0 is gone; leave loss and data as they were, or begin another run with model.path as "
                "this checkpoint's model"
            )
    other = None if loss.reference is None or known else _other_model(loss, run)
    weights = "" if known else _weights_of(run, other or run.strategy)
    found: dict[str, Any] = {"path": loss.reference}
    for name, data in splits.items():
        content = [facts.get("fingerprint") or str(run.run_dir.root.resolve()), name, data.num_pairs]
        precisions = repr(run.config.precision), getattr(run.config.trainer, "param_dtype", None)
        key = digest([1, weights, content, *precisions, torch.get_float32_matmul_precision()])
        key, checksum = known.get(name, (key, None))
        values = on_rank_0(partial(_read, cache, key, checksum), run.cpu_group)
        if values is None and not known:
            values = _compute(loss, run, other or run.strategy, data, cache, key, name)
            if values is None:
                return
            values = on_rank_0(partial(_written, cache, key, values), run.cpu_group)
        if values is None:
            raise CheckpointError(
                f"loss=dpo: what the reference said of the {name} pairs when the run began is no more in {cache.root} "
                f"(references/{key}); begin the run once more with another output_dir and max_steps=1, which computes "
                "it again, and then resume this one"
            )
        data.values[:] = torch.from_numpy(values)
        found[name] = key, hashlib.sha256(values.tobytes()).hexdigest()
        if run.world.rank == 0:
            log.info("the reference's log-probabilities of %d %s pairs: references/%s", len(values), name, key)
    facts["reference"] = found
    if not run.state.global_step and loss.reference is None:
        loss.check_first_step()


def values_of_checkpoint(path: str | None, option: Any, fingerprint: str | None, identity: Mapping[str, Any]) -> Tensor:
    """What the reference of a checkpoint's run said of its evaluation split. Raises ModelError."""
    saved = identity.get("data") or {}
    reference = saved.get("reference") or {"path": None}
    cache, values = Cache(getattr(option, "cache_dir", None)), None
    if "eval" in reference and reference["path"] == path and saved.get("fingerprint") == fingerprint:
        values = _read(cache, *reference["eval"])
    if values is None:
        raise ModelError(
            f"loss=dpo: what its reference says of these pairs is not in the data cache {cache.root}; evaluate a "
            "checkpoint on the pairs of its run, with the data cache of its training"
        )
    return torch.from_numpy(values)


def _read(cache: Cache, key: str, checksum: str | None) -> Any:
    """The values of a reference, None where there are none, or others than those with the checksum."""
    meta = cache.find("references", key)
    if meta is None:
        return None
    cache.use("references", key)
    content = (cache.root / "references" / key / "values").read_bytes()
    if hashlib.sha256(content).hexdigest() != (checksum or meta["sha256"]):
        return None
    return np.frombuffer(content).reshape(-1, 2).copy()


def _written(cache: Cache, key: str, values: Any) -> Any:
    """What lies in the cache then: values, or those of a run that has computed them at the same time."""

    def write(directory: Path) -> dict[str, Any]:
        content = values.tobytes()
        (directory / "values").write_bytes(content)
        return {"sha256": hashlib.sha256(content).hexdigest()}

    cache.build_once("references", key, write)
    return _read(cache, key, None)


def _weights_of(run: TrainingRun, strategy: Strategy) -> str:
    """Collective. A digest of all parameters, whatever a rank holds of them, of the model's settings, which may make
    another model of them, and of the adapter with its base."""
    whole = FullParameters(SimpleNamespace(run=run, strategy=strategy)).tensors()
    facts: list[Any] = [repr(getattr(strategy.parts[0], name, None)) for name in ("settings", "config")]
    facts += [repr(run.config.adapter), run.base] if strategy is run.strategy else []
    return digest([[[name, str(t.dtype), list(t.shape), checksums({name: t})[name]] for name, t in whole], facts])


def _compute(loss: Any, run: TrainingRun, strategy: Strategy, data: Any, cache: Cache, key: str, name: str) -> Any:
    """Collective. The values of all pairs, on every rank; None where a signal has ended it.

    Batches are the same whatever was computed before, so that their values are.
    """
    parts = cache.root / "references" / f".tmp-{key}"
    values = np.full((data.num_pairs, 2), np.nan)

    def take(mine: list[Any]) -> None:
        """Collective. Put together what ranks have."""
        own = np.concatenate([np.empty(0, _RECORD), *mine])
        for pairs, found in gather((own["pair"].copy(), own["values"].copy()), run.cpu_group):
            values[pairs] = found

    try:
        parts.mkdir(parents=True, exist_ok=True)
        kept = [path.read_bytes() for path in parts.glob("part-*")]
        out = tempfile.NamedTemporaryFile(prefix="part-", dir=parts, delete=False)  # noqa: SIM115
    except OSError as error:
        raise DataError(f"data.cache_dir: cannot write {parts} ({error.strerror}); name another directory") from error
    take([np.frombuffer(each[: len(each) // _RECORD.itemsize * _RECORD.itemsize], _RECORD) for each in kept])
    batches = microbatches(list(range(len(data))), run.batch_plan.micro_batch)
    mine = batches[strategy.data_rank :: strategy.data_size]
    # a rank that has none takes part with one of another
    mine = [rows for rows in mine if np.isnan(values[_pairs(data, rows)]).any()] or batches[:1]
    made: list[Any] = []
    seen: list[Any] = []
    loss.seen, loss.before_update = seen, None
    bar = Bar(f"the reference's log-probabilities of the {name} pairs", total=len(mine), shown=run.world.rank == 0)
    try:
        with out, bar, evaluation_mode(strategy.parts):
            rounds = in_rounds(_on_device(data, mine, strategy), run.cpu_group, run.sync)
            for rows, (batch, counted) in zip(chain(mine, repeat([])), rounds, strict=False):
                strategy.loss(batch)
                if counted and seen:  # on ranks with the loss
                    sums = torch.cat([each for each, *_ in seen]).double().cpu().numpy()
                    sizes = [len(data.row_pairs(row)) for row in rows]
                    record = np.empty(sum(sizes), _RECORD)
                    record["pair"] = _pairs(data, rows)
                    record["values"] = np.concatenate([s[:n] for s, n in zip(sums, sizes, strict=True)])
                    out.write(record.tobytes())
                    out.flush()
                    made.append(record)
                seen.clear()
                bar.add(1)
    except EvaluationStopped:
        return None
    finally:
        loss.seen = None
    take(made)
    return values


def _pairs(data: Any, rows: Sequence[int]) -> list[int]:
    return [pair for row in rows for pair in data.row_pairs(row)]


def _on_device(data: Any, batches: Sequence[Sequence[int]], strategy: Strategy) -> Iterator[Batch]:
    """As training gets them."""
    read = (data.__getitems__(rows) for rows in batches)
    kept = ({k: v for k, v in batch.items() if k not in (LENGTHS, SOURCES)} for batch in read)
    starts = takes_starts(strategy.parts[0], strategy.device)
    return (batch for [batch], _ in to_device((([b], None) for b in kept), strategy.device, None, starts))


def _other_model(loss: Any, run: TrainingRun) -> Strategy:
    """Collective. The model in the directory ``loss.reference`` under the strategy of the run. Raises ModelError."""
    path = Path(str(loss.reference)).expanduser()
    if not path.is_dir():
        raise ModelError(f"loss.reference: no directory {path}; give a Hugging Face model directory")
    config = replace(
        run.config, model=directory_option(path), adapter=NoAdapter(), trainable=None, gradient_checkpointing=False,
        torch_compile=False,
    )  # fmt: skip
    strategy, facts = build_strategy(config, loss), run.data_description
    build = partial(construct, config, strategy.device, vocab_size=facts["vocab_size"], seq_len=facts["seq_len"])
    strategy.materialize(model_spec(build, config, strategy, init=lambda part: fill(config, strategy.device, part, 0)))
    own, others = (known_vocab_size(each.parts) for each in (run.strategy, strategy))
    directory = getattr(run.config.model, "directory", None)
    tokens = [None if each is None else _tokens(Path(each).expanduser()) for each in (directory, path)]
    if own != others or (None not in tokens and tokens[0] != tokens[1]):
        raise ModelError(
            f"loss.reference: {path} has another vocabulary than the model that is trained ({others} and {own} "
            "tokens); give a model of the same vocabulary, or leave it out"
        )
    return strategy


def _tokens(directory: Path) -> Any:
    """The ids of a directory's tokens; None where it has no tokenizer.json."""
    if not (path := directory / "tokenizer.json").is_file():
        return None
    content = read_json_object(path, lambda why: ModelError(f"loss.reference: {why}"), limit=None)
    return content.get("model", {}).get("vocab"), [(each["id"], each["content"]) for each in content["added_tokens"]]
