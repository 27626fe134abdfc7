"""Models by their name on the Hugging Face hub: a hub of this machine that has one tiny model."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from finalized import model_directory
from huggingface_hub import constants
from program import forgather, refusal

from forgather_cli import Run

NAME, COMMIT = "nobody/tiny", "c" * 40
TRAIN = ["train", "finetune", f"model.path={NAME}", "data=text", "data.files=[notes.txt]", "seq_len=16", "max_steps=1",
         "global_batch_size=2", "per_device_train_batch_size=2", "eval_strategy=no", "callbacks=minimal", "device=cpu",
         "data.cache_dir=cache", "output_dir=run"]  # fmt: skip


class Hub:
    """What huggingface_hub asks of a hub: a commit, its files, and their content. ``asked`` are the paths, in order."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.asked: list[str] = []
        tree = [{"type": "file", "path": name, "size": len(c), "oid": _hash(c)} for name, c in files.items()]
        answers = {
            f"/api/models/{NAME}/revision/main": {"id": NAME, "sha": COMMIT, "siblings": []},
            f"/api/models/{NAME}/tree/{COMMIT}": tree,
        }
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append(path)
                name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
                found = json.dumps(answers[path]).encode() if path in answers else files.get(name)
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(found or b"")))
                self.send_header("ETag", f'"{_hash(found or b"")}"')
                self.send_header("X-Repo-Commit", COMMIT)
                if found is None:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(found or b"")

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                return

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_directory: None) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in model_directory(tmp_path / "made").iterdir()}
    hub = Hub({**files, "pytorch_model.bin": b"a pickle", "modeling.py": b"code", "onnx/config.json": b"{}"})
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_ETAG_TIMEOUT": 120,
        "HF_HUB_DOWNLOAD_TIMEOUT": 120,
    }.items():
        monkeypatch.setattr(constants, name, value)
    Path("notes.txt").write_text("to be or not to be, that is the question\n" * 20)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_a_model_of_the_hub_is_downloaded_once_and_trained(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forgather("plan", *TRAIN[1:]) == 0
    assert not [path for path in hub.asked if path.endswith(".safetensors")]  # a plan needs no weights
    assert forgather(*TRAIN) == 0
    got = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= got
    assert not got & {"pytorch_model.bin", "modeling.py"}
    assert not [path for path in hub.asked if "onnx" in path]
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (saved["model"]["path"], saved["data"]["tokenizer"]) == (NAME, NAME)  # for other machines
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert forgather("resume", "run", "max_steps=2") == 0
    assert hub.asked == []


def test_commands_take_a_model_of_the_hub(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("generate", NAME, "--prompt", "x", "--max-new-tokens", "2", "--device", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 2
    words = ["data=text", "data.files=[notes.txt]", "data.cache_dir=cache", "seq_len=16", "device=cpu", "--json"]
    assert forgather("eval", NAME, *words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["eval_loss"] > 0
    assert report["precision"] == "fp32"


def test_an_adapter_names_a_model_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forgather(*TRAIN, "adapter=lora", "adapter.r=2") == 0
    adapter = Run("run").checkpoints[-1].path / "model"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    adapter = shutil.copytree(adapter, "adapter")
    assert forgather("generate", str(adapter), "--prompt", "x", "--max-new-tokens", "2", "--device", "cpu") == 0
    assert forgather(*TRAIN, "adapter=lora", "adapter.r=2", "adapter.from_adapter=adapter", "output_dir=more") == 0


def test_what_cannot_be_had_is_one_sentence(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> str:
        (line,) = refusal(capsys, *words).strip().splitlines()
        return line

    unknown = told("generate", "nobody/nothing", "--prompt", "x")
    assert f"SOURCE: no directory 'nobody/nothing' here, and no model of that name that {hub.url} shows you" in unknown
    Path("nobody").mkdir()
    assert told("generate", NAME, "--prompt", "x").startswith(f"error: {NAME}: no such directory")
    Path("nobody").rmdir()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in told(*TRAIN)
    assert not Path("run").exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached" in told("eval", NAME)
