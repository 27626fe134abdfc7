"""``forgather eval``: the numbers, under every strategy and against transformers, and how it is refused and ended."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from program import Process, document, forgather, nobody_runs, printed, shown
from ranks import run_ranks
from tiny import decoder, metrics
from tokenizers import decoders, models

from forgather_cli.cli.evaluate import config_to_evaluate
from forgather_cli.data.text.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from forgather_cli.inference.evaluation import evaluate_source
from forgather_cli.loss.eval_metrics import EvalMetrics
from forgather_cli.loss.losses import CrossEntropy, LinearCrossEntropy, UserFusedLoss, UserLoss

pytestmark = pytest.mark.usefixtures("own_directory")

SEQ_LEN = 32
SMALL = ["model=nano", "precision=fp32",
         "hidden_size=32", f"seq_len={SEQ_LEN}", "global_batch_size=4", "warmup_steps=1", "device=cpu",
         "per_device_eval_batch_size=4", "callbacks=minimal", "max_eval_samples=null"]  # fmt: skip
STRATEGIES = {
    "ddp": ["trainer=ddp", "nproc_per_node=2"],
    "fsdp2": ["trainer=fsdp2", "nproc_per_node=2"],
    "pipeline": ["trainer=pipeline", "nproc_per_node=2", "n_microbatches=3"],
}
TEXT = "def naïve(x):\n    return '日本' * x  # 🙂\n" * 40


BLOCKING = """\
import os, time
from pathlib import Path

class Blocking:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(600)

def data():
    return {"train": Blocking(), "eval": Blocking(), "seq_len": 32}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    (root / "train.txt").write_text("class A:\n    pass\n\n" * 200)
    (root / "eval.txt").write_text(TEXT)
    return root


def data_of(corpus: Path) -> list[str]:
    files = [f"data.files=[{corpus}/train.txt]", f"data.eval_files=[{corpus}/eval.txt]"]
    return ["data=text", *files, f"data.cache_dir={corpus}/cache", "tokenizer=bytes"]


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of training with an evaluation at the end."""
    root = tmp_path_factory.mktemp("run") / "run"
    assert forgather("train", *SMALL, *data_of(corpus), "max_steps=3", "eval_steps=3", f"output_dir={root}") == 0
    return root


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    return partial(document, capsys, "eval")


def by_transformers(directory: Path, text: str) -> dict[str, float]:
    """Loss, accuracy and bits per byte of a text in windows of SEQ_LEN, each example once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(directory).encode(text))
    total = correct = targets = 0.0
    with torch.no_grad():
        for window in ids.split(SEQ_LEN):
            scores = model(window[None]).logits[0, :-1].log_softmax(-1)
            total -= scores.gather(1, window[1:, None]).sum().item()
            correct += (scores.argmax(-1) == window[1:]).sum().item()
            targets += len(window) - 1
    bits = total / math.log(2) / targets  # every target is a byte
    return {"eval_loss": total / targets, "eval_accuracy": correct / targets, "eval_bits_per_byte": bits}


def test_the_numbers_are_those_of_transformers_and_of_training(
    run: Path, corpus: Path, evaluate: Callable[..., Any]
) -> None:
    found = evaluate(str(run))
    model = run / "checkpoints/step-00000003/model"
    expected = by_transformers(model, TEXT + "<|endoftext|>" * (found["data"]["eval_tokens"] - len(TEXT.encode())))
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert found["eval_accuracy"] == pytest.approx(expected["eval_accuracy"], rel=1e-12)
    assert found["eval_bits_per_byte"] == pytest.approx(expected["eval_bits_per_byte"], rel=2e-3)
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]), rel=1e-9)
    assert found["eval_samples"] == -(-found["data"]["eval_tokens"] // SEQ_LEN)
    assert found["eval_tokens"] == found["data"]["eval_tokens"]
    assert found["eval_targets"] == found["eval_tokens"] - found["eval_samples"]
    trained = next(r["eval_loss"] for r in metrics(run) if "eval_loss" in r)
    assert found["eval_loss"] == pytest.approx(trained, rel=1e-6)
    assert (found["step"], found["ranks"], found["trainer"], found["precision"]) == (3, 1, "single", "fp32")
    alone = evaluate(str(model), *data_of(corpus), f"seq_len={SEQ_LEN}", "max_eval_samples=null")
    assert alone["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-6)


def test_files_without_a_word_on_the_split_are_evaluated_whole(
    run: Path, corpus: Path, evaluate: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the run evaluated, and however many samples of it."""
    own, size = f"files=[{corpus}/train.txt]", (corpus / "train.txt").stat().st_size
    assert "all of data.files" in shown(capsys, "eval", str(run), own, "--output", "report.json")
    found = json.loads(Path("report.json").read_text())
    assert found["data"]["eval_tokens"] == size + 1  # the end of the document
    assert found["eval_samples"] == -(-(size + 1) // SEQ_LEN)
    half = evaluate(str(run), own, "eval_files=[]", "eval_fraction=0.5")
    assert half["data"]["eval_tokens"] == pytest.approx(size / 2, rel=0.1)
    # the fraction is of documents: told is that of the tokens
    Path("a.txt").write_text("a text that is short, but not too short\n")
    Path("b.txt").write_text("a text that is rather long\n" * 40)
    split = ["files=[a.txt,b.txt]", "eval_files=[]", "eval_fraction=0.9999999"]  # all documents but the first
    capsys.readouterr()
    assert forgather("eval", str(run), *split, "--output", "split.json") == 0
    facts = json.loads(Path("split.json").read_text())["data"]
    share = facts["eval_tokens"] / (facts["train_tokens"] + facts["eval_tokens"])
    assert 0.9 < share < 0.99
    assert f"{share:.2%} of the tokens, held out by data.eval_fraction=1" in capsys.readouterr().out
    assert config_to_evaluate(run, [own, "max_eval_samples=2"])[0].config.max_eval_samples == 2


def on_a_rank(run: Path, words: list[str]) -> dict[str, Any]:
    """What a rank of ``forgather eval RUN WORDS`` finds."""
    loaded, own_tokenizer = config_to_evaluate(run, words)
    return evaluate_source(run, loaded.config, own_tokenizer=own_tokenizer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_finds_the_same(strategy: str, run: Path, evaluate: Callable[..., Any]) -> None:
    alone = evaluate(str(run))
    for found in run_ranks(2, on_a_rank, run, STRATEGIES[strategy]):
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
        for key in ("eval_accuracy", "eval_tokens", "eval_targets", "eval_bytes", "eval_samples", "step"):
            assert found[key] == alone[key], key
        assert (found["trainer"], found["ranks"]) == (strategy, 2)


def test_ranks_that_it_starts_find_the_same_or_tell_a_mistake_once_and_leave_nothing(
    run: Path, tmp_path: Path, evaluate: Callable[..., Any]
) -> None:
    jobs, ends = {}, {"ddp": ([], 0), "mistake": (["max_eval_samples=1"], 2)}
    for name, (words, _) in ends.items():
        (tmp_path / name / "tmp").mkdir(parents=True)
        words = [*STRATEGIES["ddp"], *words, "--output", "report.json"]
        env = {"TMPDIR": str(tmp_path / name / "tmp")}
        jobs[name] = Process("eval", str(run), *words, cwd=tmp_path / name, env=env)
    for name, (_, code) in ends.items():
        assert jobs[name].finish() == code, jobs[name].output
        assert not list((tmp_path / name / "tmp").iterdir())
    found, alone = json.loads((tmp_path / "ddp/report.json").read_text()), evaluate(str(run))
    assert found["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
    assert (found["trainer"], found["ranks"], found["eval_samples"]) == ("ddp", 2, alone["eval_samples"])
    assert "bits per byte" in jobs["ddp"].output
    assert sorted(path.name for path in (tmp_path / "ddp").iterdir()) == ["report.json", "tmp"]
    told = jobs["mistake"].output
    assert told.count("error: ") == 1, told
    assert "raise max_eval_samples to 2 or more" in told
    assert "Traceback" not in told
    assert [path.name for path in (tmp_path / "mistake").iterdir()] == ["tmp"]


def test_precision_and_a_fused_loss_are_settings_of_it(run: Path, evaluate: Callable[..., Any]) -> None:
    plain, fused = evaluate(str(run)), evaluate(str(run), "loss=linear_cross_entropy", "loss.chunk_size=7")
    assert fused["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)
    assert fused["eval_accuracy"] == plain["eval_accuracy"]
    rough = evaluate(str(run), "precision=bf16")
    assert rough["precision"] == "bf16"
    assert rough["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-2)
    assert rough["eval_loss"] != plain["eval_loss"]
    smooth = evaluate(str(run), "label_smoothing=0.1", "max_eval_samples=2")
    assert (smooth["eval_bits_per_byte"], smooth["eval_bytes"]) == (None, None)


def test_an_evaluation_counts_what_a_plain_comparison_counts() -> None:
    """Of logits and of hidden states in chunks, with positions that do not count."""
    model = decoder()
    ids = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        likeliest = model(ids).argmax(-1)
    labels = ids.clone()
    labels[:, 1:6] = likeliest[:, :5]  # five in a row are right
    labels[1, 3:] = -100
    counted = labels[:, 1:] != -100
    expected = ((likeliest[:, :-1] == labels[:, 1:]) & counted).sum().item()

    def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten())

    losses = [CrossEntropy(), LinearCrossEntropy(chunk_size=4), UserLoss(mean)]
    losses += [UserFusedLoss(lambda head: lambda hidden, labels: mean(head(hidden), labels))]
    for loss in losses:
        loss.eval_metrics = seen = EvalMetrics(torch.device("cpu"), torch.arange(64))
        with torch.no_grad():
            loss.total(model, {"input_ids": ids}, labels, None)
        assert seen.correct.item() == expected
        assert seen.num_bytes.item() == labels[:, 1:][counted].sum().item()


def test_tokens_know_their_bytes_where_their_text_is_made_of_them(tmp_path: Path) -> None:
    train_bpe([TEXT], 300, tmp_path / "bpe")
    bpe = FileTokenizer(tmp_path / "bpe")
    for tokenizer in (ByteTokenizer(), bpe):
        sizes = tokenizer.bytes_of_tokens()
        assert len(sizes) == tokenizer.vocab_size
        assert sizes[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())
        assert sizes[tokenizer.eos_token_id] == 0
    assert bpe.bytes_of_tokens().max() > 1
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    assert FileTokenizer(tmp_path).bytes_of_tokens() is None


def test_other_text_is_read_with_the_models_own_tokenizer(corpus: Path, evaluate: Callable[..., Any]) -> None:
    words = [*SMALL, *data_of(corpus), "data.tokenizer=bpe", "bpe_vocab_size=270", "max_steps=1"]
    assert forgather("train", *words, "output_dir=bpe") == 0
    Path("other.txt").write_text("while True:\n    class A: pass\n" * 30)
    other = ["data.files=[other.txt]", "data.eval_files=[other.txt]"]
    tokens = len(FileTokenizer(Path("bpe/checkpoints/step-00000001/model")).encode(Path("other.txt").read_text()))
    for way in (other, ["data=text", *other, f"seq_len={SEQ_LEN}", f"cache_dir={corpus}/cache"]):
        found = evaluate("bpe", *way)
        assert found["data"]["eval_tokens"] in (tokens, tokens + 1)  # an end token
        assert found["data"]["tokenizer"].endswith("step-00000001/model")
        assert 0 < found["eval_bits_per_byte"] < found["eval_loss"] / math.log(2)


def test_mistakes_are_one_message(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        code, _, told = printed(capsys, "eval", *words)
        assert code == 2
        return told

    told = refused(str(run), "max_steps=3", "hidden_size=64", "optimizer=sgd", "eval_steps=3")
    assert "4 config mistakes" in told
    assert "max_steps: nothing reads it in eval, which trains nothing; leave it out" in told
    assert "model.hidden_size: eval takes the model of SOURCE as it is; leave it out" in told
    assert "max_stepz: unknown setting" in refused(str(run), "max_stepz=3")
    assert "max_steps: nothing reads it" in refused(str(run / "checkpoints/step-00000003/model"), "max_steps=5")
    told = refused(str(run), "--output", "nowhere/report.json")
    assert re.search("has no folder.*; name a file in a folder that exists and may be written", told)
    several = ["trainer=ddp", "nnodes=2", "rdzv_endpoint=localhost:29500"]
    assert "nnodes: eval runs on one machine, got 2; set nnodes=1" in refused(str(run), *several)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "eval: starts its ranks itself" in refused(str(run))


def test_ctrl_c_ends_all_ranks_at_once(run: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    Path("blocking.py").write_text(BLOCKING)
    Path("conf/data").mkdir(parents=True)
    Path("conf/data/blocking.yaml").write_text("# Never comes.\n_target_: blocking.data\n")
    env = {"TMPDIR": str(tmp_path / "tmp")}
    with Process("eval", str(run), *STRATEGIES["ddp"], "data=blocking", env=env) as job:
        job.until(lambda: sum(bool(path.read_text()) for path in Path().glob("pid-*")) == 2)
        job.process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert job.finish() == 130, job.output
    assert time.monotonic() - sent < 60
    assert nobody_runs([int(path.read_text()) for path in Path().glob("pid-*")])
    assert job.lines[-1] == "ended by SIGINT"
    assert "Traceback" not in job.output
    assert not list((tmp_path / "tmp").iterdir())
