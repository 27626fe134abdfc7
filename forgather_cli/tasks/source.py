"""``forgather eval --tasks``: tasks on what ``forgather eval`` takes, in one process or as one rank's part in it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import Config, value_at
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.distributed import pick_device, world
from forgather_cli.documents.regular_files import append, write_whole
from forgather_cli.inference.evaluation import described_by, materialize, prepared
from forgather_cli.loss.build import build_loss
from forgather_cli.strategies.build import build_strategy
from forgather_cli.tasks.lm import StrategyLM, max_length_of
from forgather_cli.tasks.run import load_tasks, run_tasks
from forgather_cli.terminal.bars import Bar, doing


def evaluate_source(
    source: Path, config: Config, *, tasks: dict[str, Any], own_tokenizer: bool = True, trust_config: bool = False
) -> dict[str, Any]:
    """Collective. Run ``tasks``, as ``command.request`` has them, on what ``source`` stands for, with its own tokenizer
    always. Appends the report to the run's tasks.jsonl. Raises SetupError.
    """
    with doing("reading the tasks"):
        built = load_tasks(tasks["names"], tasks["tasks_dir"], num_fewshot=tasks["fewshot"])
    config, found, group = prepared(source, config, trust_config=trust_config)
    base, files = described_by(found.directory), found.directory
    files = files if (files / "tokenizer.json").is_file() else base  # of an adapter's
    tokenizer, seq_len = load_tokenizer(str(files), add_bos=found.add_bos), getattr(config.data, "seq_len", 1024)
    strategy = build_strategy(config, loss=build_loss(config.loss, device=pick_device(config.device)))
    with doing("reading the model"):
        materialize(strategy, found, config, tokenizer.vocab_size, seq_len, group)
    is_first = world().rank == 0
    with Bar("tasks", shown=is_first) as bar, contextlib.redirect_stdout(io.StringIO()):  # lm-eval prints
        lm = StrategyLM(
            strategy, tokenizer, files, max_length=max_length_of(base, seq_len),
            max_tokens=config.per_device_eval_batch_size * seq_len, group=group, on_batch=bar.update,
        )  # fmt: skip
        results, answers = run_tasks(
            lm, built, limit=tasks["limit"], apply_chat_template=tasks["apply_chat_template"],
            bootstrap_iters=1000, with_samples=tasks["samples"] is not None,
        )  # fmt: skip
    report = {
        "step": None if found.reader is None else found.reader.step,
        "model": str(found.path),
        "trainer": str(value_at(config, "trainer")),
        "ranks": world().size,
        "precision": config.precision.type,
        **{name: tasks[name] for name in ("limit", "apply_chat_template")},
        **results,
    }
    if is_first and tasks["samples"] is not None:
        lines = ({"task": name, **sample} for name, each in answers.items() for sample in each)
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
        write_whole(Path(tasks["samples"]), text)
    if is_first and found.run is not None:
        append(found.run.tasks, (json.dumps(report) + "\n").encode())
    return report
