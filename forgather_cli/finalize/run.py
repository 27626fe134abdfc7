"""``forgather finalize``: from a run, a checkpoint or a model directory to a directory that other tools load.

choose -> measure the source -> write weights, tokenizer, configs -> quantize -> load from disk, compare -> publish
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import forgather_cli
from forgather_cli.checkpoint.files import check_absent, hash_range, new_directory, remove
from forgather_cli.checkpoint.tensors import Weights, write_weights
from forgather_cli.config.decode import load_saved
from forgather_cli.config.load import load_untrusted
from forgather_cli.config.schema import Config
from forgather_cli.data.chat.ends import end_of_turn, stop_tokens
from forgather_cli.data.text.tokenizer import Tokenizer, load_tokenizer
from forgather_cli.distributed import pick_device
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError
from forgather_cli.finalize.card import model_card
from forgather_cli.finalize.export import (
    TORCH_DTYPES,
    ConvertedWeights,
    Vocabulary,
    num_positions,
    read_config,
    short_name,
    write_configs,
    write_json,
)
from forgather_cli.finalize.options import LOGIT_BOUND, FinalizeOptions
from forgather_cli.finalize.prove import by_transformers, compare_merge, compare_result, measure_source
from forgather_cli.finalize.sample import choose_sample
from forgather_cli.finalize.source import REPORT, Chosen, choose
from forgather_cli.finalize.tokens import (
    NewToken,
    add_to_tokenizer,
    check_new,
    read_chat_template,
    read_new_tokens,
    write_chat_template,
)
from forgather_cli.hub import hub_name_of
from forgather_cli.inference.source import Located
from forgather_cli.models.pretrained import AUTO_MAP, ENCODER_DECODER, MODELING_FILE
from forgather_cli.terminal.bars import Bar, doing

Say = Callable[[str], None]
_COPIED = ("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
_NAMES_CODE = ("auto_map", "custom_pipelines")  # in config.json (transformers 5.23)
_MADE = "made"  # folder of a mean or a merged model, inside the temporary directory


@dataclass(frozen=True)
class FinalizePlan:
    """Everything that is known before anything is written."""

    chosen: Chosen
    options: FinalizeOptions
    config: Config | None
    """Of the run; None where the model belongs to none."""
    untrusted: str | None
    """What keeps the run's data from being loaded."""
    model_config: dict[str, Any]
    tokenizer: Tokenizer
    """The source's."""
    new_tokens: Sequence[NewToken]
    chat_template: str | None
    vocab: Vocabulary
    layout: dict[str, Any]
    """Of quantized weights, as the run was trained for it: ``group_size`` and ``exclude``; empty: the recipe's."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it is ours, whose modeling file lies beside."""
        return self.model_config.get("model_type") == ENCODER_DECODER

    def conversion(self, directory: Path) -> ConvertedWeights:
        """The tensors of the model in ``directory`` as they will be written."""
        dtype = None if self.options.dtype is None else TORCH_DTYPES[self.options.dtype]
        return ConvertedWeights(Weights(directory), self.model_config, dtype, self.vocab)


def finalize(source: Path, destination: Path, options: FinalizeOptions, say: Say = lambda line: None) -> dict[str, Any]:
    """Write the model of ``source`` to ``destination``, which must not exist; returns what ``finalize_report.json``
    holds. Nothing is left behind by a failure.

    ``say`` gets a line for each thing worth telling. Raises ConfigError, SetupError, and ProofError where the result,
    loaded from disk, is not the source's model.
    """
    job = prepare(source, destination, options, say)
    stored = job.chosen.described_by
    room = job.conversion(stored).num_bytes * (1 + bool(options.quantize))
    if job.chosen.is_made:  # first of all
        room += sum(spec.num_bytes for spec in Weights(stored).specs().values())
    if options.gguf_types:
        from forgather_cli.gguf.files import size_of

        room += size_of(job.model_config, Weights(stored), options.gguf_types, job.chosen.alone)
    with new_directory(destination, room) as directory:
        report = _made(job, directory, destination.resolve().name, say)
        report["destination"] = str(destination.resolve())
        write_json(directory / REPORT, report)
        (directory / "README.md").write_text(model_card(report, destination.resolve().name), encoding="utf-8")
    return report


@doing("reading the source")
def prepare(source: Path, destination: Path, options: FinalizeOptions, say: Say) -> FinalizePlan:
    """Find, verify and check everything that can be known before anything is written."""
    check_absent(destination)
    if options.gguf_types:
        from forgather_cli.gguf.reader import check_installed

        check_installed("--gguf")
    new_tokens = [] if options.add_tokens is None else read_new_tokens(options.add_tokens)
    template = None if options.chat_template is None else read_chat_template(options.chat_template)
    if options.quantize is not None:
        from forgather_cli.finalize.quantize import check_recipe

        check_recipe(options.quantize, pick_device("auto"))
    chosen = choose(source, options, say)
    directory = chosen.described_by
    model_config = read_config(directory)
    if options.gguf_types:
        from forgather_cli.gguf.files import check

        check(model_config, options.gguf_types, chosen.alone)
    has_tokenizer = (chosen.located.directory / "tokenizer.json").is_file()  # an adapter of peft's may have none
    where = chosen.located.directory if has_tokenizer else directory
    tokenizer = load_tokenizer(str(where), add_bos=chosen.located.add_bos)
    if options.add_tokens is not None:
        check_new(new_tokens, tokenizer, options.add_tokens)
    vocab = Vocabulary(tokenizer.vocab_size, tokenizer.vocab_size + len(new_tokens))
    config: Config | None = None
    untrusted: dict[str, str] = {}
    run = chosen.located.run
    if run is not None and options.trust_config:
        config = load_saved(run.newest_config())
    elif run is not None:
        config, untrusted = load_untrusted(run.newest_config())
    layout: dict[str, Any] = {}
    if options.quantize is not None:
        from forgather_cli.finalize.quantize import sort_layers

        recipe, as_trained = (config and config.precision.trained_for) or (None, {})
        if recipe == options.quantize:
            layout = as_trained
        elif recipe is not None:
            say(f"the run was trained for {recipe}, not for {options.quantize}")
        sort_layers(directory, options.quantize, **layout)
    data = untrusted.get("data")
    return FinalizePlan(chosen, options, config, data, model_config, tokenizer, new_tokens, template, vocab, layout)


def describe(job: FinalizePlan) -> dict[str, Any]:
    """What would be made, for ``--dry-run``."""
    tensors = job.conversion(job.chosen.described_by)
    return {
        "source": job.chosen.lineage(),
        "model": _model(job, tensors),
        "added_tokens": [{"token": token.text, "special": token.special} for token in job.new_tokens],
        "chat_template": job.chat_template is not None,
        "quantization": job.options.quantize,
        "bytes": tensors.num_bytes,
    }


# ------------------------------------------------------------------------------------------------------------ making


def _made(job: FinalizePlan, directory: Path, name: str, say: Say) -> dict[str, Any]:
    """Fill ``directory``, which will have this name; returns the report."""
    options = job.options
    if job.chosen.members:
        say(f"averaging {len(job.chosen.members)} checkpoints")
    if job.chosen.is_merged:
        say(f"merging the adapter into {job.chosen.described_by}")
    found = job.chosen.model(directory / _MADE)
    if job.chosen.is_merged:  # its head may have come apart from its embedding
        job = replace(job, model_config=read_config(found.directory))
    described = found.directory if job.chosen.is_made else job.chosen.described_by
    tensors = job.conversion(described)
    stored = Weights(described).dtype
    with doing("reading the text to compare on"):
        sample = choose_sample(
            options.text,
            job.config,
            job.tokenizer,
            num_positions(job.model_config),
            job.untrusted,
            is_paired=job.is_encoder_decoder,
        )
    say(f"measuring the source on {sample.num_tokens:,} tokens ({sample.origin})")
    rounding = tensors.dtype if options.dtype is not None and tensors.dtype != stored else None
    shared = job.vocab.before if job.vocab.added else int(job.model_config.get("vocab_size") or job.vocab.before)
    reference = measure_source(found, sample, shared, rounding)
    apart = measure_source(job.chosen.located, sample, shared, None).exact if job.chosen.is_merged else None
    beside_stored = theirs = None
    if apart is not None and job.chosen.adapter is not None and job.chosen.adapter.is_of_peft:
        say("measuring what peft makes of the adapter")
        theirs = by_transformers(job.chosen.located.directory, sample, shared, exact=True, is_source=True)
    if apart is not None and job.chosen.in_four_bits:
        beside_stored = measure_source(job.chosen.located, sample, shared, None, as_stored=True).exact
    say("writing")
    if job.chosen.alone is not None:
        ids: dict[str, int] = {}
        stop = _write_adapter(job, directory)
        if job.chosen.in_four_bits:
            say("the adapter was trained beside a base in four bits: on the base as it is stored it is a slightly")
            say("different model; README.md has the lines that load it as it was trained")
    else:
        ids, stop = _write(job, found, tensors, directory, say)
    remove(directory / _MADE)
    if options.quantize is not None:
        from forgather_cli.finalize.quantize import quantize_directory

        say(f"quantizing with {options.quantize}")
        quantize_directory(directory, options.quantize, **job.layout)
    say("loading the result from disk and comparing")
    proof = compare_result(directory, reference, sample, options)
    proof["vocabulary_grew"] = bool(job.vocab.added)
    if apart is not None:
        bound, rounds = LOGIT_BOUND if options.quantize else options.bound, stored != torch.float32
        proof["merge"] = compare_merge(reference.exact, apart, beside_stored, theirs, bound, rounds=rounds)
    files: list[dict[str, Any]] = []
    if options.gguf_types:
        from forgather_cli.gguf.files import write_and_prove

        files = write_and_prove(
            directory, name, options.gguf_types, sample, stop, job.chosen.lineage(), job.chosen.located.add_bos,
            job.chosen.alone, options.max_ratio, say,
        )  # fmt: skip
    decoded = load_tokenizer(str(directory))
    sizes = {path: path.stat().st_size for path in sorted(directory.rglob("*")) if path.is_file()}
    versions = {"forgather": forgather_cli.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("transformers", "peft", "torchao", "bitsandbytes", *(("gguf", "xllamacpp") if files else ())):
        if importlib.util.find_spec(package) is not None:
            versions[package] = importlib.metadata.version(package)
    with Bar("hashing the files", "bytes", total=sum(sizes.values())) as bar:
        hashes = {path: hash_range(path, 0, size, bar.add) for path, size in sizes.items()}
    return {
        "source": job.chosen.lineage(),
        "model": _model(job, tensors),
        "added_tokens": [{"token": t.text, "id": ids[t.text], "special": t.special} for t in job.new_tokens],
        "stop_tokens": [{"id": token, "token": decoded.decode([token])} for token in stop],
        "chat_template": (directory / "chat_template.jinja").is_file(),
        "quantization": options.quantize,
        **({} if job.chosen.adapter is None else {"adapter": _adapter(job)}),
        "proof": proof,
        **({"gguf": files} if files else {}),
        "files": {
            path.relative_to(directory).as_posix(): {"bytes": size, "sha256": hashes[path]}
            for path, size in sizes.items()
        },
        "versions": versions,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _write_adapter(job: FinalizePlan, directory: Path) -> list[int]:
    """The adapter's files and the tokenizer. Returns the tokens that end a text."""
    from forgather_cli.adapters.directory import CONFIG, QUANTIZATION, WEIGHTS

    for name in (CONFIG, WEIGHTS, QUANTIZATION, "generation_config.json"):
        if (job.chosen.located.directory / name).is_file():
            shutil.copyfile(job.chosen.located.directory / name, directory / name)
    job.tokenizer.save(directory)
    ending = None
    with contextlib.suppress(DataError):
        ending = end_of_turn(directory, job.tokenizer)
    return stop_tokens(directory, job.tokenizer, ending)


def _write(
    job: FinalizePlan, found: Located, tensors: ConvertedWeights, directory: Path, say: Say
) -> tuple[dict[str, int], list[int]]:
    """The plain model. Returns the ids of the new tokens, and those that end a text."""
    for name in _COPIED:
        if (found.directory / name).is_file():
            shutil.copyfile(found.directory / name, directory / name)
    job.tokenizer.save(directory)
    model_config = _without_code(job, found.directory, directory, say)
    if job.is_encoder_decoder:
        model_config["auto_map"] = AUTO_MAP
        shutil.copyfile(MODELING_FILE, directory / MODELING_FILE.name)
    ids = add_to_tokenizer(directory, job.new_tokens) if job.new_tokens else {}
    if job.chat_template is not None:
        write_chat_template(directory, job.chat_template)
    try:
        ending = end_of_turn(directory, load_tokenizer(str(directory)))
    except DataError as error:
        if job.chat_template is not None:
            raise DataError(f"--chat-template: {job.options.chat_template}: {error}") from error
        # a template that the source came with may be one that refuses a plain conversation
        say(f"{error}; where an answer ends is not known")
        ending = None
    if isinstance(ending, str):
        say(f"the chat template ends a turn with {ending!r}, which is not one token: generation cannot stop there")
        say("add it with --add-tokens")
    stop = stop_tokens(directory, job.tokenizer, ending)
    write_weights(directory, tensors.specs.values(), tensors)  # one tensor in memory at a time
    write_configs(directory, model_config, dtype=tensors.dtype, vocab=job.vocab, tokenizer=job.tokenizer, stop=stop)
    return ids, stop


def _without_code(job: FinalizePlan, source: Path, directory: Path, say: Say) -> dict[str, Any]:
    """config.json without what names code, which a loader that trusts it would run; ``directory``'s tokenizer likewise.

    What our encoder-decoder brings is ours, and not told of.
    """
    ours = MODELING_FILE.name if job.is_encoder_decoder else None
    left = [path.name for path in sorted(source.glob("*.py")) if path.name != ours]
    model_config = {key: value for key, value in job.model_config.items() if key not in _NAMES_CODE}
    left += [
        f"{key} of config.json"
        for key in _NAMES_CODE
        if key in job.model_config and not (ours and job.model_config[key] == AUTO_MAP)
    ]
    path = directory / "tokenizer_config.json"
    settings = read_json_object(path, DataError)
    if settings.pop("auto_map", None) is not None:
        left.append(f"auto_map of {path.name}")
        write_json(path, settings)
    if left:
        say(f"left out, as code that a loader may run: {', '.join(left)}")
    return model_config


def _adapter(job: FinalizePlan) -> dict[str, Any]:
    adapter = job.chosen.adapter
    assert adapter is not None
    return {
        "type": adapter.settings.type,
        "r": adapter.settings.r,
        "base": hub_name_of(adapter.base.resolve()) or str(adapter.base.resolve()),
        "merged": job.chosen.is_merged,
    }


def _model(job: FinalizePlan, tensors: ConvertedWeights) -> dict[str, Any]:
    named = job.model_config.get("architectures") or [str(job.model_config.get("model_type"))]
    vocab = int(job.model_config.get("vocab_size") or job.vocab.before)
    return {
        "architecture": named[0],
        "parameters": tensors.num_parameters,
        "dtype": short_name(tensors.dtype),
        "vocab_size": job.vocab.rows(vocab),
    }
