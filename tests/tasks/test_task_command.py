"""``forgather eval --tasks``: what it prints and writes, on what it runs, and how it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import chats
import own_tasks
import pytest
from finalized import model_directory
from huggingface_hub import constants
from paired import model as encoder_decoder
from program import SMALL, document, forgather, printed, refusal, shown

from forgather_cli.checkpoint.tensors import write_model_directory
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.models.pretrained import write_model_files

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture
def tasks() -> str:
    return str(own_tasks.write_tasks(Path("mine").absolute()))


def asked(tasks: str, *names: str) -> list[str]:
    return ["--tasks", ",".join(names or ["mine_choice"]), "--tasks-dir", tasks]


def test_a_table_a_document_samples_and_a_line_of_the_run(tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *[word for word in SMALL if "samples" not in word],
        "data=text",
        f"data.files=[{tasks}/train.jsonl]",
        "data.tokenizer=bytes",
        "eval_strategy=no",
    ]
    assert forgather("train", *words, "seq_len=128", "max_steps=2", "output_dir=run") == 0
    page = shown(capsys, "eval", "run", *asked(tasks, "mine_choice", "mine_rolling"), "--fewshot", "2", "--limit", "5")
    rows = [line.split() for line in page.splitlines() if "mine_" in line]
    assert [row[:2] for row in rows] == [
        ["mine_choice", "acc"], ["mine_choice", "acc_norm"],
        ["mine_rolling", "word_perplexity"], ["mine_rolling", "bits_per_byte"],
    ]  # fmt: skip
    assert rows[0][3] == "±"  # the standard error
    assert rows[0][-2:] == ["2", "5"]
    on_ranks = ["trainer=ddp", "nproc_per_node=2", "--samples", "samples.jsonl", "--output", "report.json"]
    found = document(capsys, "eval", "run", *asked(tasks), "--fewshot", "2", "--limit", "5", *on_ranks)
    assert json.loads(Path("report.json").read_text()) == found
    assert found["metrics"]["tasks/mine_choice/acc"] == float(rows[0][2])
    assert (found["ranks"], found["samples"], found["fewshot"]) == (2, {"mine_choice": 5}, {"mine_choice": 2})
    samples = [json.loads(line) for line in Path("samples.jsonl").read_text().splitlines()]
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2, 3, 4]
    assert sum(sample["acc"] for sample in samples) / 5 == found["metrics"]["tasks/mine_choice/acc"]
    first, second = map(json.loads, Path("run/tasks.jsonl").read_text().splitlines())
    assert first["step"] == second["step"] == 2
    assert list(first["samples"]) == ["mine_choice", "mine_rolling"]
    assert second["metrics"] == found["metrics"]


def test_a_model_directory_and_an_adapter(tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    model_directory(Path("base"), max_position_embeddings=512)
    of_base = document(capsys, "eval", "base", *asked(tasks), "device=cpu")["metrics"]
    words = [
        "model=pretrained", "model.path=base", "adapter=lora", "precision=fp32", "data=text", "device=cpu",
        f"data.files=[{tasks}/train.jsonl]", "data.tokenizer=base", "eval_strategy=no", "learning_rate=0.1",
        "seq_len=32", "max_steps=3",
        "global_batch_size=4", "callbacks=minimal", "output_dir=run",
    ]  # fmt: skip
    assert forgather("train", *words) == 0
    adapter = next(Path("run/checkpoints").iterdir()) / "model"
    of_adapter = document(capsys, "eval", str(adapter), *asked(tasks, "mine_rolling"), "device=cpu")["metrics"]
    of_run = document(capsys, "eval", "run", *asked(tasks, "mine_rolling"))["metrics"]
    assert of_adapter == of_run
    assert of_adapter != document(capsys, "eval", "base", *asked(tasks, "mine_rolling"), "device=cpu")["metrics"]
    assert set(of_base) == {
        f"tasks/mine_choice/{name}" for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    }
    assert not list(Path("base").glob("*.jsonl"))  # no run, no line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "3"], "--tasks: names no task"),
        (["--tasks", ""], "--tasks: names no task"),
        (["--tasks", "a", "--tasks-dir", "nowhere"], "--tasks-dir: no such directory: nowhere"),
        (["--tasks", "a", "--samples", "no/folder"], "--samples: no/folder has no folder"),
        (["--tasks", "mine_chat", "--tasks-dir", "mine", "--apply-chat-template"], "base: has no chat template"),
        (
            ["--tasks", "broken", "--tasks-dir", "mine"],
            "task mine/broken.yaml: cannot be made (ParserError",
        ),
        (["--tasks", "gone", "--tasks-dir", "mine"], "task gone: cannot be made (FileNotFoundError: Unable to find '"),
        (
            ["--tasks", "mine_choice", "--tasks-dir", "mine", "--fewshot", "20"],
            "tasks mine_choice: cannot be run",
        ),
        (
            ["--tasks", "unsafe", "--tasks-dir", "mine"],
            "tasks unsafe: cannot be run (ValueError: Attempted to run task: unsafe",
        ),
    ],
)
def test_refusals(words: list[str], message: str, tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    model_directory(Path("base"))
    choice = Path("mine/mine_choice.yaml").read_text()
    Path("mine/broken.yaml").write_text("task: broken\nmetric_list: [")
    Path("mine/gone.yaml").write_text(choice.replace("mine_choice", "gone").replace("choice.jsonl", "gone.jsonl"))
    Path("mine/unsafe.yaml").write_text(choice.replace("mine_choice", "unsafe") + "unsafe_code: true\n")
    said = refusal(capsys, "eval", "base", *words, "device=cpu")
    assert said.replace(f"{Path().absolute()}/", "").startswith(f"error: {message}")
    assert said.count("\n") == 1


def test_a_gguf_file_and_an_encoder_decoder_are_refused(tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m.gguf").touch()
    assert "tasks are run on what torch loads" in refusal(capsys, "eval", "m.gguf", *asked(tasks))
    model = encoder_decoder(257)
    Path("both").mkdir()
    write_model_directory(Path("both"), model.state_dict())
    write_model_files(model, ByteTokenizer(), Path("both"))
    assert "is an encoder-decoder" in refusal(capsys, "eval", "both", *asked(tasks), "device=cpu")


def test_a_tokenizer_without_a_begin_and_an_end_is_refused(tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    for file in model_directory(Path("base")).glob("*config.json"):
        file.write_text(
            json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k[:4] not in ("bos_", "eos_")})
        )
    assert "no begin token and no end token" in refusal(capsys, "eval", "base", *asked(tasks), "device=cpu")


def test_a_dataset_that_cannot_be_fetched_is_said_with_the_command_that_fetches_it(
    tasks: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a moment, before the model is looked at."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = Path("mine/mine_choice.yaml").read_text().replace("dataset_path: json", "dataset_path: nobody/nothing")
    Path("mine/mine_choice.yaml").write_text(text.replace("dataset_kwargs", "dataset_name: easy\n# dataset_kwargs"))
    model_directory(Path("base"))
    Path("base/model.safetensors").write_bytes(b"not a model")
    done = printed(capsys, "eval", "base", *asked(tasks))
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert done.err.startswith("error: task mine_choice: its dataset is not in the cache (")
    assert "python -c \"from datasets import load_dataset; load_dataset('nobody/nothing', 'easy')\"\n" in done.err


@pytest.mark.full  # lm-eval reads 14 000 YAML files
def test_a_name_that_nobody_has(tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    chats.write_lines(Path("x.jsonl"), [])
    model_directory(Path("base"))
    said = refusal(capsys, "eval", "base", *asked(tasks, "mine_choise"))
    assert "did you mean mine_choice?" in said
