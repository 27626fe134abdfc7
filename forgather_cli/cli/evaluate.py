"""``forgather eval``: loss and perplexity of a trained model."""

from __future__ import annotations

from typing import Any

from forgather_cli.cli.common import (
    AsJson,
    Overrides,
    check_overrides,
    human_seconds,
    only_json,
    print_facts,
    print_json,
)
from forgather_cli.cli.source import SourcePath, check_source, config_for


def evaluate(source: SourcePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    r"""Loss and perplexity of a run, a checkpoint or a model directory.

    On the data it was trained with, or on another: [cyan]data=text data.files=\[mine.txt][/].
    """
    words = check_overrides(overrides)
    check_source(source)
    loaded = config_for(source, words)
    from forgather_cli.source import evaluate_source, load_source

    with only_json(as_json):
        found = load_source(source, device=loaded.config.device)
        metrics = evaluate_source(found, loaded.config)
    document = {"source": str(source), "step": found.step, **metrics}
    if as_json:
        print_json(document)
    else:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    shown = {key: value for key, value in document.items() if value is not None}
    print_facts({key.removeprefix("eval_").replace("_", " "): _shown(key, value) for key, value in shown.items()})


def _shown(key: str, value: Any) -> str:
    if key == "eval_runtime":
        return f"{value:.2f}s" if value < 10 else human_seconds(value)
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
