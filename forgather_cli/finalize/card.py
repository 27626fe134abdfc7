"""README.md of a finalized model: a model card with its lineage, for people and for model hubs.

Format of the front matter: https://huggingface.co/docs/hub/model-cards (YAML between two lines of dashes).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forgather_cli.gguf.options import told


def model_card(report: Mapping[str, Any], name: str) -> str:
    """The text of README.md from a report."""
    # no license: only who trained it can choose one
    is_adapter = "adapter" in report and not report["adapter"]["merged"]
    library = f"peft\nbase_model: {json.dumps(report['adapter']['base'])}" if is_adapter else "transformers"
    front = f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- forgather\n---"
    return "\n\n".join([front, f"# {name}", _summary(report), _use(report), _lineage(report), _files(report)])


def _summary(report: Mapping[str, Any]) -> str:
    model, proof = report["model"], report["proof"]
    how = f", quantized with {report['quantization']}" if report["quantization"] else ""
    apart = ""
    if adapter := report.get("adapter"):
        kind = f"{adapter['type']} adapter (r {adapter['r']})"
        apart, how = ("", f"{how}, with a {kind} merged in") if adapter["merged"] else (f"A {kind} of ", how)
    lines = [
        f"{apart}{model['architecture']}, {model['parameters']:,} parameters in {model['dtype']}{how}, a vocabulary of "
        f"{model['vocab_size']:,} tokens. Made with Forgather {report['versions']['forgather']}.",
        "",
        "| | source | this model |",
        "|---|---|---|",
        f"| perplexity on {proof['tokens']:,} tokens ({proof['sample']}) | {proof['perplexity_source']:.5g} | "
        f"{proof['perplexity_result']:.5g} |",
        "",
        f"Largest difference of a logit from {proof['compared_with']}: {proof['max_logit_difference']:.2g}."
        if report["quantization"] is None
        else f"Perplexity ratio: {proof['perplexity_ratio']:.4f}.",
        *(f"\n`{file['file']}`: {told(file)}." for file in report.get("gguf", [])),
    ]
    return "\n".join(lines)


def _use(report: Mapping[str, Any]) -> str:
    if "adapter" in report and not report["adapter"]["merged"]:
        before, how, note = "", "", ""
        if report["adapter"]["type"] == "qlora":
            before, how = "import json\n\n", ', quantization_config=json.load(open("quantization_config.json"))'
            note = (
                "\n\nIt was trained beside that base in four bits (NF4, `bitsandbytes`). Without `quantization_config` "
                "it is loaded beside the base as it is stored, which is a slightly different model."
            )
        return (
            f"## Use\n\n```python\n{before}from peft import AutoPeftModelForCausalLM\n"
            f"from transformers import AutoTokenizer\n\n# of the base {report['adapter']['base']}\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("."{how})\n'
            f'tokenizer = AutoTokenizer.from_pretrained(".")\n```{note}'
        ) + "".join(
            f"\n\nIn llama.cpp, beside a GGUF file of that base: `llama-server -m base.gguf --lora {each['file']}`."
            for each in report.get("gguf", [])[:1]
        )
    extra = "\nThe weights are quantized: loading needs `torchao`.\n" if report["quantization"] else ""
    stop = ", ".join(f"`{token['token']}` ({token['id']})" for token in report["stop_tokens"]) or "none"
    # the file of its class lies beside the weights
    paired = report["model"]["architecture"] == "Qwen3ForSeq2SeqLM"
    kind, trust = ("Seq2SeqLM", ", trust_remote_code=True") if paired else ("CausalLM", "")
    return (
        f"## Use\n\n```python\nfrom transformers import AutoModelFor{kind}, AutoTokenizer\n\n"
        f'model = AutoModelFor{kind}.from_pretrained(".", dtype="auto"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("."{trust})\n```\n{extra}\nA text ends at: {stop}.'
    )


def _lineage(report: Mapping[str, Any]) -> str:
    source = report["source"]
    rows = {"made from": f"{source['kind']} `{source['path']}`"}
    for key in ("run", "step", "saved", "strategy", "world_size", "manifest_sha256"):
        if source.get(key) is not None:
            rows[key.replace("_", " ")] = f"{source[key]}"
    for key in ("metrics", "data", "training", "made_from"):
        if source.get(key):
            rows[key.replace("_", " ")] = f"`{json.dumps(source[key], ensure_ascii=False, default=str)}`"
    if source.get("members"):
        rows["mean of"] = "<br>".join(f"`{member}`" for member in source["members"])
    rows["trained with"] = _versions(source.get("versions", {}))
    rows["finalized with"] = _versions(report["versions"])
    rows["finalized"] = report["created"]
    cells = {key: value.replace("|", "\\|").replace("\n", " ") for key, value in rows.items() if value}
    table = [f"| {key} | {cell} |" for key, cell in cells.items()]
    return "\n".join(["## Lineage", "", "| | |", "|---|---|", *table])


def _files(report: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {entry['bytes']:,} | `{entry['sha256']}` |" for name, entry in report["files"].items()]
    return "\n".join(["## Files", "", "| file | bytes | SHA-256 |", "|---|---|---|", *rows]) + "\n"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
