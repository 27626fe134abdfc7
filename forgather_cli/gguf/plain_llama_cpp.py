"""What llama.cpp makes of a GGUF file, in an interpreter of its own.

    python -P plain_llama_cpp.py REQUEST ANSWER     (JSON files: arguments of a function here, and what it returns)

Nothing of Forgather is imported here, nor torch. llama.cpp comes by ``xllamacpp``, whose server is asked over HTTP at
an address of this machine. The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SURE = 1e9  # a bias that makes a token the only one
ALIVE: list[Any] = []  # servers: one that ends may wait forever for its own threads (xllamacpp 2026.10)


class LlamaCpp:
    """A file in llama.cpp, which computes in fp32 but for what its types make of the inputs of a product."""

    def __init__(self, model: str, n_ctx: int, threads: int = 1, lora: tuple[str, float] | None = None) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx = n_ctx
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.warmup = params.fit_params = False
        params.verbosity = 1  # errors alone, on stderr
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.swa_full = True  # else a prefix is computed anew for each token
        params.no_extra_bufts = True  # weights are not packed anew
        if lora is not None:
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(*lora)]
        self._server = xllamacpp.Server(params)
        ALIVE.append(self._server)

    def ask(self, path: str, **request: Any) -> Any:
        """What the server answers; raises RuntimeError where it refuses."""
        url = f"{self._server.listening_address}/{path}"
        body = json.dumps(request).encode() if request else None
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode(errors="replace")) from error

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        asked = self.ask("tokenize", content=text, add_special=add_special, parse_special=True)
        return [int(number) for number in asked["tokens"]]

    def next_token(self, prefix: list[int], forced: int, probabilities: int = 0, length: int = 1) -> dict[str, Any]:
        """What follows on a prefix, which is made to be ``forced``.

        The probabilities are those before it was. They are not told of a token that is an end, or a part of a
        character alone (llama.cpp, October 2026).
        """
        answer = self.ask(
            "completion",
            prompt=prefix,
            n_predict=length,
            n_probs=probabilities,
            post_sampling_probs=False,
            temperature=0.0,
            cache_prompt=True,
            logit_bias=[[forced, SURE]],
        )
        return dict(answer)


def find(models: list[str], texts: list[str], wanted: list[list[int]]) -> dict[str, Any]:
    """The number of the first file that encodes the texts as wanted, None where none does; and how many texts are
    encoded so from the first on, at most."""
    most = 0
    for number, model in enumerate(models):
        with contextlib.suppress(RuntimeError, urllib.error.URLError):  # a name that this llama.cpp does not know
            reader = LlamaCpp(model, 64)
            equal = (reader.encode(text) == ids for text, ids in zip(texts, wanted, strict=True))
            same = sum(1 for _ in itertools.takewhile(bool, equal))
            if same == len(texts):
                return {"found": number, "same": same}
            most = max(most, same)
    return {"found": None, "same": most}


def measure(
    model: str, threads: int, sequences: list[list[int]], probabilities: int, plain: int, texts: list[str],
    special: list[int], messages: list[dict[str, str]] | None, lora: tuple[str, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All that is compared of a file.

    For each prefix of each sequence the likeliest tokens with their log-probabilities, as many as ``probabilities``;
    of ``texts`` the ids, with what the file puts around; which of ``special`` end a text; the chat with its ids.
    ``plain``: a token of whole characters that ends no text. ``lora``: an adapter's file beside, and its scale.
    """
    reader = LlamaCpp(model, max(map(len, sequences)) + 8, threads, lora)
    likeliest = []
    for sequence in sequences:
        for stop in range(1, len(sequence) + 1):
            answer = reader.next_token(sequence[:stop], plain, probabilities)
            top = answer["completion_probabilities"][0]["top_logprobs"]
            likeliest.append([[each["id"] for each in top], [each["logprob"] for each in top]])
    ends = [n for n in special if reader.next_token(sequences[0][:1], n, length=2)["stop_type"] == "eos"]
    chat = None
    if messages is not None:
        try:
            prompt = reader.ask("apply-template", messages=messages)["prompt"]
            chat = {"prompt": prompt, "ids": reader.encode(prompt, add_special=True)}
        except RuntimeError as error:
            chat = {"error": str(error)}
    encoded = [reader.encode(text, add_special=True) for text in texts]
    return {"likeliest": likeliest, "ends": ends, "chat": chat, "texts": encoded}


def context_length(model: str) -> dict[str, Any]:
    """How many tokens the model takes."""
    return {"tokens": LlamaCpp(model, 8).ask("v1/models")["data"][0]["meta"]["n_ctx_train"]}


def losses(
    model: str, threads: int, sequences: list[list[int]], targets: list[list[int]], plain: int, vocab: int
) -> dict[str, Any]:
    """Of each sequence the sum over its targets, nats; a target below 0 is none."""
    reader = LlamaCpp(model, max(map(len, sequences)) + 8, threads)
    made = []
    for sequence, wanted in zip(sequences, targets, strict=True):
        loss = 0.0
        for length, target in enumerate(wanted, 1):
            if target < 0:
                continue
            told = reader.next_token(sequence[:length], target, 1).get("completion_probabilities")
            if told:
                loss -= told[0]["logprob"]
                continue
            top = reader.next_token(sequence[:length], plain, vocab)["completion_probabilities"][0]["top_logprobs"]
            loss -= next(each["logprob"] for each in top if each["id"] == target)
        made.append(loss)
    return {"losses": made}


def end_with_input() -> None:
    """Nothing is to be read: it ends when who asked has ended."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        known = {"find": find, "measure": measure, "context_length": context_length, "losses": losses}
        made = known[asked.pop("do")](**asked)  # type: ignore[operator]
        Path(sys.argv[2]).write_text(json.dumps(made), encoding="utf-8")
    except Exception as error:  # whatever llama.cpp raises, it does not read the file
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        if not ALIVE:  # nothing was loaded: a usual end waits for the thread that writes llama.cpp's log, the reason
            sys.exit(1)
        os._exit(1)
    os._exit(0)  # the server's threads may wait for each other at the end (xllamacpp 2026.10)
