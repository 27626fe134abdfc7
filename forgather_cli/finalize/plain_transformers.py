"""Run as a script: what the transformers library alone computes with a model directory.

    python -I plain_transformers.py DIRECTORY INPUTS OUTPUTS DTYPE

INPUTS is a safetensors file of ``N.input_ids`` and ``N.decoder_input_ids``; OUTPUTS gets ``N.logits`` for each, and
``greedy``, the tokens that ``generate`` writes to the first. Forgather cannot be imported here.
"""

import sys


def main(directory: str, inputs: str, outputs: str, dtype: str) -> None:
    sys.modules["forgather_cli"] = None  # type: ignore[assignment]
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=True
    ).eval()
    given, found = load_file(inputs), {}
    with torch.no_grad():
        for number in range(len(given) // 2):
            sides = {key: given[f"{number}.{key}"] for key in ("input_ids", "decoder_input_ids")}
            found[f"{number}.logits"] = model(**sides).logits.float().contiguous()
        greedy = model.generate(given["0.input_ids"], max_new_tokens=16, do_sample=False, eos_token_id=None)
    save_file({**found, "greedy": greedy.contiguous()}, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
