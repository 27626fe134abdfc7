"""``forgather serve``: what an OpenAI client gets, which file is served, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from program import SMALL, document, forgather, printed, refusal
from serving import Served, f32_file

from forgather_cli.data.cache import Cache, entries
from forgather_cli.data.chat.template import CHATML
from forgather_cli.inference.source import load_source

TEXT = "The river had risen in the night. The miller said that the road was gone, and nobody went to town.\n"
PROMPTS = ["The river", "The miller said", "nobody went", "in the night. The"]
LENGTH = 24


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In that of the session other tests make files meanwhile, and lose them where it is pruned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a chat template, of a model that has read one text."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "text.txt").write_text(TEXT * 60)
    (folder / "tokens").write_text("<|im_start|>\n<|im_end|>\n")
    (folder / "chat.jinja").write_text(CHATML)
    data = ["data=text", f"data.files=[{folder}/text.txt]", "tokenizer=bpe", "data.seq_len=64", "max_steps=40"]
    small = [word for word in SMALL if not word.startswith(("data", "seq_len", "num_"))]
    assert forgather("train", *small, *data, "learning_rate=1e-2", f"output_dir={folder}/run") == 0
    words = ["--add-tokens", f"{folder}/tokens", "--chat-template", f"{folder}/chat.jinja"]
    assert forgather("finalize", str(folder / "run"), str(folder / "miller"), *words) == 0
    return folder / "miller"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with Served(str(model), "--gguf", "f32") as process:
        yield process


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def test_four_at_once_write_what_generate_writes(
    server: Served, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = server.client()

    def answers(prompt: str) -> tuple[str, str]:
        request = {"model": "miller", "max_tokens": LENGTH, "temperature": 0}
        plain = client.completions.create(prompt=prompt, **request)
        chat = client.chat.completions.create(messages=messages(prompt), **request)
        return plain.choices[0].text, chat.choices[0].message.content

    with ThreadPoolExecutor(4) as threads:
        theirs = list(threads.map(answers, PROMPTS))
    words = ["generate", str(model), "--greedy", "--max-new-tokens", str(LENGTH), "--prompt"]
    for prompt, (plain, chat) in zip(PROMPTS, theirs, strict=True):
        assert document(capsys, *words, prompt, "--raw")["text"] == plain
        assert document(capsys, *words, prompt)["text"] == chat
    assert any("road was gone" in plain for plain, _ in theirs)
    assert client.models.list().data[0].id == "miller"


def test_an_answer_streams_stops_and_tells_its_log_probabilities(server: Served, model: Path) -> None:
    client, request = server.client(), {"model": "miller", "temperature": 0, "max_tokens": LENGTH}
    whole = client.completions.create(prompt=PROMPTS[0], **request).choices[0]
    pieces = [each.choices[0].text for each in client.completions.create(prompt=PROMPTS[0], stream=True, **request)]
    assert "".join(pieces) == whole.text
    assert len(pieces) > LENGTH // 2
    word = whole.text.split()[3]
    stopped = client.completions.create(prompt=PROMPTS[0], stop=[word], **request).choices[0]
    assert (stopped.text, stopped.finish_reason) == (whole.text.partition(word)[0], "stop")
    chat = client.chat.completions.create(messages=messages("x"), stream=True, logprobs=True, top_logprobs=3, **request)
    assert sum(bool(each.choices[0].delta.content) for each in chat) > 1
    told = client.completions.create(prompt=PROMPTS[0], logprobs=3, **request).choices[0].logprobs
    source = load_source(model, device="cpu")
    with torch.no_grad():
        ids = source.tokenizer.encode(PROMPTS[0])
        right = source.model(torch.tensor([ids]))
        right = getattr(right, "logits", right)[0, -1].float().log_softmax(-1).topk(3)
    top = told.content[0]["top_logprobs"]
    assert [each["id"] for each in top] == right.indices.tolist()
    assert [each["logprob"] for each in top] == pytest.approx(right.values.tolist(), abs=1e-4)  # 5e-4 with keys in fp16


def test_without_the_key_nothing_is_answered(server: Served) -> None:
    assert len(server.key) == 64
    for wrong in ("wrong", server.key[:-1], server.key.upper() + "x"):
        with pytest.raises(openai.AuthenticationError):
            server.client(wrong).completions.create(model="miller", prompt="x", max_tokens=1)
    for path, code in {"/v1/completions": 401, "/v1/models": 401, "/props": 401, "/slots": 401, "/health": 200}.items():
        body = b"{}" if path == "/v1/completions" else None
        request = urllib.request.Request(server.url.removesuffix("/v1") + path, body)
        try:
            found = urllib.request.urlopen(request).status
        except urllib.error.HTTPError as error:
            found = error.code
        assert (path, found) == (path, code)


@pytest.mark.parametrize(("words", "count", "most"), [([], 4, 512), (["--context", "256"], 1, 256)])
def test_a_request_takes_as_much_as_the_model_and_four_do_so_at_once(
    words: list[str], count: int, most: int, tmp_path: Path
) -> None:
    with Served(str(f32_file(tmp_path / "random", 512)), *words) as process:

        def length(_: int) -> int:
            request = {"prompt": "The", "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
            return process.client().completions.create(model="any", **request).usage.total_tokens

        with ThreadPoolExecutor(count) as threads:
            assert list(threads.map(length, range(count))) == [most] * count


def test_a_second_start_takes_the_file_from_the_cache_and_a_changed_source_is_made_anew(
    server: Served, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def kept() -> int:
        return sum(entry.kind == "gguf" for entry in entries(Cache(None).root))

    assert forgather("cache", "prune", "--all", "--yes") == 0  # what tests before have left
    count = kept()
    with Served(str(model), "--gguf", "f32", env={"FORGATHER_API_KEY": "mine"}) as again:
        assert any(f"serving f32 of {model} from the cache" in line for line in again.lines)
        assert not any("measuring" in line for line in again.lines)
        assert again.key == "the one given"
        assert again.client("mine").completions.create(model="miller", prompt="x", max_tokens=1).choices
        assert f"{'gguf':6}" in printed(capsys, "cache", "list").out
        assert forgather("cache", "prune", "--all", "--yes") == 0  # what is used stays
        assert kept() == count
    other = tmp_path / "other"
    shutil.copytree(model, other)
    settings = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps({**settings, "temperature": 0.5}))
    with Served(str(other), "--gguf", "f32") as changed:
        assert any("measuring the source" in line for line in changed.lines)
        assert kept() == count + 1


def test_an_adapter_is_merged_with_its_base(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("The miller said that nobody went to the river in the night.\n" * 60)
    data = ["data=text", f"data.files=[{tmp_path}/text.txt]", "data.seq_len=64", "max_steps=30"]
    small = [word for word in SMALL if not word.startswith(("data", "seq_len", "num_", "model"))]
    base = ["model=pretrained", f"model.path={model}", "adapter=lora", "learning_rate=1e-2"]
    assert forgather("train", *small, *data, *base, f"output_dir={tmp_path}/lora") == 0
    request = {"prompt": PROMPTS[1], "max_tokens": LENGTH, "temperature": 0}
    words = ["--greedy", "--max-new-tokens", str(LENGTH), "--prompt", PROMPTS[1], "--raw"]
    ours = {source: document(capsys, "generate", str(source), *words)["text"] for source in (model, tmp_path / "lora")}
    assert len(set(ours.values())) == 2
    assert forgather("finalize", str(tmp_path / "lora"), str(tmp_path / "tuned"), "--gguf", "f32") == 0
    with Served(str(tmp_path / "tuned"), "--gguf", "f32") as process:  # the file there is the adapter alone
        theirs = process.client().completions.create(model="any", **request)
        assert (theirs.choices[0].text, theirs.model) == (ours[tmp_path / "lora"], "tuned")


def test_a_file_and_a_directory_that_has_one_are_served_as_they_are(tmp_path: Path) -> None:
    file = f32_file(tmp_path / "random", 128)
    report = {"gguf": [{"file": "random.gguf", "type": "f32"}]}
    (file.parent / "finalize_report.json").write_text(json.dumps(report))
    for source, words, name in ((file, ["--no-key"], "random"), (file.parent, ["--name", "me", "--no-key"], "me")):
        with Served(str(source), *words) as process:
            assert any("warning: any program here is answered" in line for line in process.lines)
            assert process.key == "none"
            answer = process.client("x").completions.create(model="x", prompt="The", max_tokens=2)
            assert answer.model == name
            assert any("the file has no template" in line for line in process.lines)
            assert not any("measuring" in line for line in process.lines)  # nothing is made


def test_what_cannot_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f32_file(tmp_path / "random", 128)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for source in (file, "nothing-there"):  # before anything is looked at
            words = [str(source), "--port", str(port)]
            assert "error: --port: Address already in use" in refusal(capsys, "serve", *words)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-100])
    for words, told in {
        (str(cut),): "error: llama.cpp cannot load and run cut.gguf (tensor '",
        ("none.gguf",): "none.gguf: no such directory",
        (str(tmp_path),): "is no run (config.yaml), no checkpoint",
        (str(file), "--gguf", "f16"): "random.gguf is a GGUF file already; leave --gguf out",
        (str(file), "--gguf", "q9"): "--gguf: must be one of q8_0, f16",
        (str(file), "--no-key", "--host", "0.0.0.0"): "--no-key: whoever reaches 0.0.0.0 would be answered",
        (str(file), "--no-key", "--api-key", "x"): "--no-key: excludes --api-key",
        (str(file), "--host", "nowhere.invalid"): "nowhere.invalid",
    }.items():
        error = refusal(capsys, "serve", *words, "--port", "0")
        assert told in error
        assert len(error.strip().splitlines()) == 1
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else find(name))
    error = refusal(capsys, "serve", str(file), "--port", "0")
    assert "error: serve: needs xllamacpp, which is not installed; pip install 'forgather[gguf]'" in error
