"""``forgather finalize``: from a checkpoint to a model that other tools load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from forgather_cli.cli.output import (
    AsJson,
    console,
    human,
    human_bytes,
    interruptible,
    only_json,
    print_facts,
    print_json,
)
from forgather_cli.cli.words import SourcePath, TrustConfig, local_source
from forgather_cli.config.schema import QuantizeRecipe
from forgather_cli.finalize.options import DtypeName, FinalizeOptions
from forgather_cli.gguf.options import GGUF_TYPES, told
from forgather_cli.run_dir import shown
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import tell


def finalize(
    source: SourcePath,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A directory that does not exist.", show_default=False)],
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint instead of its newest.")] = False,
    average: Annotated[
        int | None, typer.Option(metavar="K", help="The mean of the run's last K checkpoints.", show_default=False)
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of an adapter: the whole model, with the adapter in its weights.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="fp32, bf16 or fp16; else as the source.", show_default=False)
    ] = None,
    add_tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Tokens to add, special ones: one a line, or a JSON list of tokens and of objects "
            '{"token": ..., "special": false}.',
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Jinja chat template.", show_default=False)
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="RECIPE", help=f"{', '.join(get_args(QuantizeRecipe))}.", show_default=False)
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE,...",
            help=f"Files for llama.cpp and Ollama too, proved by llama.cpp: {', '.join(GGUF_TYPES)}.",
            show_default=False,
        ),
    ] = None,
    max_ratio: Annotated[
        float | None,
        typer.Option(metavar="X", help="Largest ratio of a GGUF file's perplexity (by its type).", show_default=False),
    ] = None,
    max_divergence: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Largest difference of a logit (1e-4); with --quantize largest ratio of the perplexities (1.10).",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to compare on, instead of the run's evaluation split or a built-in text.",
            show_default=False,
        ),
    ] = None,
    trust_config: TrustConfig = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a model directory that other tools load, and prove it.

    SOURCE's files are verified; weights, tokenizer, configs and a README with the lineage are written beside DEST;
    then the result is loaded from disk and compared with the source. Only what passes gets the name DEST; whatever
    goes wrong leaves nothing behind.
    """
    options = FinalizeOptions(
        best=best,
        average=average,
        merge=merge,
        dtype=cast("DtypeName | None", dtype),
        add_tokens=add_tokens,
        chat_template=chat_template,
        quantize=cast("QuantizeRecipe | None", quantize),
        gguf=gguf,
        max_ratio=max_ratio,
        max_divergence=max_divergence,
        text=text,
        trust_config=trust_config,
    )
    source = local_source(source)
    with only_json(as_json):
        with doing("importing torch"):
            from forgather_cli.finalize import run

        screen = console(stderr=True)
        with interruptible():
            if dry_run:
                report = run.describe(run.prepare(source, dest, options, screen.print))
            else:
                report = run.finalize(source, dest, options, screen.print)
    if as_json:
        print_json(report)
    else:
        print_facts(_facts(report))
        tell(f"{dest}: nothing was written (--dry-run)" if dry_run else str(dest))


def _facts(report: dict[str, Any]) -> dict[str, str]:
    source, model = report["source"], report["model"]
    facts = {"source": shown(source["path"]) + (f" ({source['strategy']})" if source.get("strategy") else "")}
    if source.get("members"):
        facts["mean of"] = f"{len(source['members'])} checkpoints"
    how = f", {report['quantization']}" if report["quantization"] else ""
    facts["model"] = f"{model['architecture']}, {human(model['parameters'])} parameters, {model['dtype']}{how}"
    if adapter := report.get("adapter"):
        merged = "merged into" if adapter["merged"] else "of"
        facts["adapter"] = f"{adapter['type']}, r {adapter['r']}, {merged} {shown(adapter['base'])}"
    facts["vocabulary"] = f"{model['vocab_size']:,} tokens"
    if added := [token["token"] for token in report["added_tokens"]]:
        first = ", ".join(added[:5]) + (", ..." if len(added) > 5 else "")
        facts["vocabulary"] += f", {len(added)} of them new ({first})"
    if "proof" not in report:
        return {**facts, "size": human_bytes(report["bytes"])}
    stop = ", ".join(f"{token['token']} ({token['id']})" for token in report["stop_tokens"])
    size = sum(entry["bytes"] for entry in report["files"].values())
    files = {proof["file"]: told(proof) for proof in report.get("gguf", [])}
    return {**facts, "stop tokens": stop or "none", **_proof(report["proof"]), **files, "size": human_bytes(size)}


def _proof(proof: dict[str, Any]) -> dict[str, str]:
    on_logits = proof["bound_on"] == "max_logit_difference"
    bounds = [f" (bound {proof['bound']:g})" if here else "" for here in (on_logits, not on_logits)]
    perplexities = f"{proof['perplexity_source']:.6g} source, {proof['perplexity_result']:.6g} result"
    shared = f", over the {proof['vocabulary_compared']:,} tokens of the source" if proof["vocabulary_grew"] else ""
    facts = {
        "compared": f"{proof['tokens']:,} tokens of {proof['sample']}, result loaded through {proof['loaded_through']}",
        "logits": f"differ by at most {proof['max_logit_difference']:.3g} from {proof['compared_with']}{bounds[0]}",
        "perplexity": f"{perplexities}, ratio {proof['perplexity_ratio']:.5f}{bounds[1]}{shared}",
    }
    if merge := proof.get("merge"):
        facts["merging"] = (
            f"perplexity {merge['perplexity_ratio']:.5f} times that of base and adapter apart "
            f"(bound {merge['bound']:g}), logits differ by at most {merge['max_logit_difference']:.3g}"
        )
        if (ratio := merge.get("perplexity_ratio_to_stored_base")) is not None:
            facts["four bits"] = f"perplexity {ratio:.5f} times that of the adapter beside the base as it is stored"
    return facts
