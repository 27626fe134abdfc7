"""The main of every rank: ``build`` makes data, model and callbacks from the config, ``work`` trains.

``python -m forgather_cli.worker`` is a rank that our launcher started; ``trainer=single``, and ranks that torchrun or
the like started, run in the process of the command. In both ``launch/rank.py`` sets up log, signals and process group
around ``work``.

What needs torch is imported where it is used: before that a rank reports to its launcher and watches for signals.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.config.decode import written_tree
from forgather_cli.config.schema import Config, Target
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.exit_status import ExitStatus, done
from forgather_cli.launch.processes import collect_less, keep_heap, leave
from forgather_cli.launch.rank import main as rank_process
from forgather_cli.run_dir import RunDir
from forgather_cli.terminal.bars import Bar, doing

if TYPE_CHECKING:
    from forgather_cli.checkpoint.manifest import Manifest
    from forgather_cli.data.splits import DataSplits
    from forgather_cli.trainer.script import Trainer

_TOKENIZER = "model/tokenizer.json"  # in a checkpoint


def main() -> int:
    """A rank that our launcher started, as a process; returns its exit code."""
    return rank_process(work)


def work(config: Config, run_dir: RunDir, rank: RankContext) -> ExitStatus:
    """Train, or evaluate for ``forgather eval``, as one rank; returns how that ended."""
    if run_dir.evaluation.exists():
        return _evaluate(config, run_dir, rank.place.rank)
    trainer = build(config, run_dir, rank=rank)
    trainer.train()
    return trainer.finish()


@doing("importing torch")
def build(
    config: Config,
    run_dir: RunDir,
    tree: dict[str, Any] | None = None,
    *,
    origin: dict[str, Any] | None = None,
    rank: RankContext | None = None,
) -> Trainer:
    """The Trainer of ``config``: data, model and callbacks.

    ``tree``: what ``config.yaml`` has, if it is there already. ``origin``: what ``origin.yaml`` is to hold; given,
    ``train()`` takes and leaves the run directory itself. ``rank``: this process, where a command has started the run.
    """
    from forgather_cli.callbacks.build import build_callbacks
    from forgather_cli.distributed import pick_device, world
    from forgather_cli.hub import with_local_model
    from forgather_cli.models.build import construct, fill, own_vocab_size
    from forgather_cli.trainer.from_python import RunFiles
    from forgather_cli.trainer.script import Trainer

    device, config = pick_device(config.device), with_local_model(config)
    if config.logging_dir is not None:
        run_dir = replace(run_dir, logging_dir=Path(config.logging_dir))
    learned = _with_learned_tokenizer(config, run_dir)
    data = read_data(learned, shown=world().rank == 0)
    if learned is not config:
        data.description["tokenizer"] = "bpe"
    vocab_size = data.vocab_size  # of a model of the user's, which is asked for it
    if isinstance(config.model, Target) and (own := own_vocab_size(config.model)) is not None:
        vocab_size = own or None  # 0: it asks for none, and how many tokens it has is not known
    tree = written_tree(config, run_dir.newest_config()) if tree is None else tree
    built = build_callbacks(config.callbacks, run_dir, config_tree=tree)
    run_files = None if origin is None else RunFiles(run_dir, tree, origin, built)
    what = "building the model"
    with doing(what if rank is None else rank.meet(what)):
        return Trainer(
            model_init=lambda: construct(
                config, device, vocab_size=data.vocab_size, seq_len=data.seq_len, num_new=data.num_new
            ),
            init_weights=None
            if isinstance(config.model, Target)
            else partial(fill, config, device, num_known=data.num_known),
            args=replace(config, output_dir=str(run_dir.root)),
            train_dataset=data.train,
            eval_dataset=data.eval,
            processing_class=data.tokenizer,
            callbacks=built if run_files is None else run_files.callbacks,
            job=rank,
            config_tree=tree,
            data_description={
                **data.description,
                "seq_len": data.seq_len,
                "vocab_size": vocab_size,
                "vocabulary": getattr(data.tokenizer, "fingerprint", None),  # a user's has none
                "fingerprint": data.fingerprint,
            },
            data_files=data.files,
            run_files=run_files,
        )


def _with_learned_tokenizer(config: Config, run_dir: RunDir) -> Config:
    """``tokenizer=bpe`` where a run resumes: not the BPE of the data, which may be others now, but the checkpoint's."""
    resume, components = config.resume_from_checkpoint, config.resume_components
    if not resume or not (components == "all" or "model" in components):
        return config
    if isinstance(config.data, Target) or config.data.tokenizer != "bpe":
        return config
    from forgather_cli.checkpoint.choice import choose
    from forgather_cli.data.cache import Cache
    from forgather_cli.data.text.tokenize import kept_tokenizer

    def verify(manifest: Manifest, path: Path) -> list[str]:
        """Of this file alone: all others are verified by who loads them, and the run has one tokenizer."""
        known = _TOKENIZER in manifest.files
        problem = manifest.problem(path, _TOKENIZER, "full", lambda _: None) if known else None
        return [] if problem is None else [problem]

    if isinstance(resume, str):
        path = Path(resume)
    elif (found := choose(run_dir, verify)) is not None:
        path = found.path
    else:
        return config
    if not (path / _TOKENIZER).is_file():
        return config
    tokenizer = kept_tokenizer(path / "model", Cache(config.data.cache_dir))
    return replace(config, data=replace(config.data, tokenizer=str(tokenizer)))


def read_data(config: Config, *, shown: bool = True) -> DataSplits:
    """The data that ``config``, whose models and tokenizers are on this machine, trains on; makes what is not cached,
    which is ``shown`` as a bar. Raises DataError."""
    from forgather_cli.data.build import check_own_tokenizer, load_data
    from forgather_cli.models.build import most_tokens
    from forgather_cli.models.pretrained import num_sentinels

    check_own_tokenizer(config.data, config.model)
    with doing("reading the data"), Bar("tokenizing", "bytes") as bar:
        return load_data(
            config.data,
            seed=max(config.seed, 0),
            progress=bar.update if shown else None,
            model_path=getattr(config.model, "path", None),
            num_sentinels=num_sentinels(config.model),
            model_tokens=most_tokens(config),
        )


@doing("importing torch")
def evaluated(request: dict[str, Any], config: Config) -> dict[str, Any]:
    """Collective. The report that ``forgather eval`` asks for, of a loss or of tasks."""
    words = {**request, "source": Path(request["source"])}
    if "tasks" in request:
        from forgather_cli.tasks.source import evaluate_source as run_tasks

        return run_tasks(**words, config=config)
    from forgather_cli.inference.evaluation import evaluate_source

    return evaluate_source(**words, config=config)


def _evaluate(config: Config, run_dir: RunDir, rank: int) -> ExitStatus:
    """Evaluate for ``forgather eval``. A signal ends the process at once, since nothing here polls for it."""
    logging.getLogger("forgather_cli").setLevel(logging.WARNING)  # as in one process
    request = json.loads(run_dir.evaluation.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):  # what the launcher prints is one document
        report = evaluated(request, config)
    if rank == 0:
        run_dir.report.write_text(json.dumps(report), encoding="utf-8")
    return done(rank)


if __name__ == "__main__":
    collect_less()
    keep_heap()
    leave(main())
