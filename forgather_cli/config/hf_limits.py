"""What ``data=hf`` cannot do, as config mistakes, and which of its settings another one makes void."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.schema import Config, HfSettings


def hf_problems(config: Config) -> Iterator[str]:
    data = config.data
    if not isinstance(data, HfSettings):
        return
    if data.dataset is None and not data.data_files:
        yield (
            "dataset: data=hf reads a dataset of the hub, a directory or data_files, got none; "
            "set data.dataset=user/name or data.data_files=[texts/*.jsonl]"
        )
    if data.eval_files and not data.data_files:
        yield "eval_files: go with data_files, got none of those; set data_files too, or eval_split"
    if data.eval_files and data.eval_split:
        yield "eval_split: eval_files are evaluated on already; set one of the two"
    if data.streaming and data.tokenizer == "bpe":
        yield (
            "tokenizer: bpe is trained on a whole corpus before training begins, which streaming=true does not read; "
            "set tokenizer=bytes or a directory, or streaming=false"
        )
    for name, split in (("train_split", data.train_split), ("eval_split", data.eval_split or "")):
        if data.streaming and set(split) & set("[+"):
            yield f"{name}: a stream is read from its beginning to its end, got {split!r}; name a whole split"


def void_in_hf(data: HfSettings) -> Iterator[tuple[str, str, str]]:
    """(setting, the setting that makes it void, what would make it count)."""
    if data.streaming:
        yield "data.eval_fraction", "data.streaming", "set data.eval_split or data.eval_files"
        yield from ((f"data.{name}", "data.streaming", "set streaming=false") for name in _OF_CACHE)
    else:
        yield "data.shuffle_buffer", "data.streaming", "set streaming=true"
    for name in ("eval_split", "eval_files"):
        if getattr(data, name) and not data.streaming:
            yield "data.eval_fraction", f"data.{name}", f"leave {name} out"


_OF_CACHE = ("tokenize_processes", "cache_dir")
