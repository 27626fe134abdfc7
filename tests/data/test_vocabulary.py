"""Whose tokens a model sees: the tokenizer of its directory, and ids of data of the user's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import chats
import pytest
import tiny
import yaml
from program import document, forgather, printed, refusal

from forgather_cli.config.decode import dump_tree
from forgather_cli.config.load import load_config, load_resumed
from forgather_cli.config.schema import DataTarget
from forgather_cli.data.build import load_data
from forgather_cli.data.text.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from forgather_cli.errors import DataError, ModelError, PartError
from forgather_cli.plan.run import make_plan
from forgather_cli.run_dir import RunDir

TEXT = "to be or not to be, that is the question\n" * 50
WORDS = [
    "data=text", "seq_len=32", "device=cpu", "precision=fp32", "callbacks=minimal", "save_steps=1",
    "global_batch_size=4", "warmup_steps=1", "eval_strategy=no",
]  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tokenizer with a model beside it."""
    train_bpe([TEXT], 270, tmp_path / "model")
    chats.write_model(tmp_path / "model", "llama", 272)
    return tmp_path / "model"


def tokenizer_of(*words: str) -> str:
    return str(getattr(load_config(None, list(words)).config.data, "tokenizer", None))


def test_the_tokenizer_of_a_pretrained_model_is_its_own_unless_another_is_given(
    directory: Path, tmp_path: Path
) -> None:
    pretrained = ["model=pretrained", f"model.path={directory}"]
    for data in (["data=instruct", "data.files=[x.jsonl]"], []):
        assert tokenizer_of(*pretrained, *data) == str(directory)
    assert tokenizer_of("model=transformers", f"model.path={directory}") == str(directory)
    assert tokenizer_of(*pretrained, "data.tokenizer=bytes") == "bytes"
    assert load_config("finetune", [f"model.path={directory}"]).tree["data"]["tokenizer"] == str(directory)
    assert tokenizer_of() == tokenizer_of("model=transformers", "model.config={model_type: gpt2}") == "bpe"
    loaded = load_config(None, [*pretrained, "data.tokenizer=bytes", f"output_dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(dump_tree(loaded.tree))
    assert load_resumed(tmp_path / "config.yaml", []).tree["data"]["tokenizer"] == "bytes"
    users = load_data(DataTarget(path="test_vocabulary.own"), seed=0, model_path=str(directory))
    assert users.vocab_size == users.tokenizer.vocab_size == 270


def test_a_pretrained_model_with_other_ids_than_its_own_is_refused_unless_said_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], one_thread: None
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    base = [*WORDS, f"data.files=[{tmp_path}/a.txt]", f"cache_dir={tmp_path}/cache", "max_steps=2", "model=pretrained"]
    train_bpe([TEXT], 265, tmp_path / "words")
    ByteTokenizer().save(tmp_path / "letters")
    for name, size in (("words", 265), ("letters", 257)):
        chats.write_model(tmp_path / name, "llama", size)
    run = tmp_path / "new"
    given = [*base, f"model.path={tmp_path}/words", f"output_dir={run}"]
    for other in (["tokenizer=bpe", "bpe_vocab_size=260"], ["tokenizer=bytes"]):
        error = refusal(capfd, "train", *given, *other)
        assert "data.tokenizer: " in error
        assert "model.replace_tokenizer=true" in error
    assert forgather("train", *given, "tokenizer=bytes", "model.replace_tokenizer=true") == 0
    letters = [f"model.path={tmp_path}/letters", "tokenizer=bytes", f"output_dir={tmp_path}/more"]
    assert forgather("train", *base, *letters) == 0, "a model that knows bytes"
    # a run that was begun before it was asked for
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"].pop("replace_tokenizer") is True
    del config["forgather_version"]  # as 0.2 wrote it
    (run / "config.yaml").write_text(dump_tree(config))
    assert forgather("resume", str(run), "max_steps=3") == 0


def test_a_bpe_of_other_data_is_no_tokenizer_for_a_model_that_has_learned_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(TEXT)
    Path("b.txt").write_text("whether it is nobler to suffer\n" * 50)
    words = [*WORDS, "cache_dir=cache", "bpe_vocab_size=265", "model=nano"]
    assert forgather("train", *words, "data.files=[a.txt]", "max_steps=2", "output_dir=run") == 0
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["data"]["tokenizer"] == "bpe"
    del config["tokenizer_default"]  # as before there was one
    Path("run/config.yaml").write_text(dump_tree(config))
    assert forgather("resume", "run", "max_steps=3") == 0
    damaged = Path(shutil.copytree("run", "hurt"), "checkpoints/step-00000003/model/tokenizer.json")
    whole = damaged.read_bytes()
    for content in (whole[:40], whole.replace("Ġ".encode(), b"xx", 1)):
        assert content != whole
        damaged.write_bytes(content)
        capfd.readouterr()
        assert forgather("resume", "hurt", "max_steps=3", "save_strategy=no") == 0
        assert "training from step 2 of 3" in capfd.readouterr().out, "the one before is whole"
    others = ["data.files=[b.txt]", "resume_components=[model,optimizer,trainer]"]
    capfd.readouterr()
    assert forgather("resume", "run", "max_steps=4", *others, "tokenizer=bytes") == 2
    assert "data.tokenizer: bytes makes other tokens than those that the model has learned" in capfd.readouterr().err

    def tokenizer(run: str, step: int) -> bytes:
        return Path(run, f"checkpoints/step-{step:08d}/model/tokenizer.json").read_bytes()

    learned = tokenizer("run", 3)
    assert forgather("resume", "run", "max_steps=4", *others, "save_total_limit=1") == 0
    assert forgather("resume", "run", "max_steps=5") == 0, "of the other data now"
    fork = ["output_dir=fork", "resume_from_checkpoint=run/checkpoints/step-00000005", "max_steps=6"]
    assert forgather("train", *words, *fork, *others) == 0
    assert tokenizer("run", 5) == tokenizer("fork", 6) == learned
    assert forgather("train", *words, "data.files=[b.txt]", "max_steps=1", "output_dir=fresh") == 0
    assert tokenizer("fresh", 1) != learned


ROWS = [{"input_ids": [1, 2, 300], "labels": [1, 2, 300]}] * 16


def own(vocab_size: int | None = None, streams: bool = False) -> dict[str, Any]:
    """Data that says, or does not, how many tokens it has."""
    told = {} if vocab_size is None else {"vocab_size": vocab_size}
    return {"train": iter(ROWS) if streams else ROWS, "seq_len": 3, **told}


def run_own(tmp_path: Path, *words: str) -> Any:
    base = ["model=nano", "precision=fp32", "callbacks=minimal", f"output_dir={tmp_path}/run", "global_batch_size=8",
            "max_steps=2", "data._target_=test_vocabulary.own", "eval_strategy=no", "save_strategy=no",
            "device=cpu"]  # fmt: skip
    (tmp_path / "run").mkdir()
    return tiny.train(load_config(None, [*base, *words]).config, RunDir(tmp_path / "run"))


def test_own_data_without_a_vocabulary_gets_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.vocab_size: unknown, .*'tokenizer' or 'vocab_size', or set model\."):
        run_own(tmp_path)


@pytest.mark.parametrize("word", ["+data.vocab_size=301", "model.vocab_size=301"])
def test_own_data_with_one_trains_and_textgen_says_that_it_writes_nothing_without_a_tokenizer(
    tmp_path: Path, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run_own(tmp_path, word, "+callbacks.textgen={generation_steps: 1}")
    assert trainer.model.settings.vocab_size == 301
    assert trainer.processing_class is None
    assert "callbacks.textgen: there is no tokenizer" in caplog.text
    assert not (tmp_path / "run" / "samples.txt").exists()


@pytest.mark.parametrize("streams", ["false", "true"])
def test_ids_of_the_first_batches_are_compared_with_the_model(tmp_path: Path, streams: str) -> None:
    with pytest.raises(PartError, match=r"token id 300 is outside of the model's vocabulary of 257 tokens"):
        run_own(tmp_path, "model.vocab_size=257", f"+data.streams={streams}")


def test_a_plan_says_unknown_where_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=nano", "data._target_=test_vocabulary.own", "max_steps=2", "global_batch_size=8"]
    made = make_plan(load_config(None, words).config)
    assert (made.vocab_size, made.seq_len, made.tokens_per_step) == (None, None, None)
    assert not made.parameters
    told = printed(capsys, "plan", *words).out
    assert "unknown: your data tells its vocabulary when it is made; set model.vocab_size" in told
    assert document(capsys, "plan", *words)["num_parameters"] is None
    made = make_plan(load_config(None, [*words, "model.vocab_size=301"]).config)
    assert made.num_parameters > 0
    assert made.flops_per_token is None  # the length of sequences is not known
    assert "model.vocab_size" in refusal(capsys, "plan", "--fit", *words)


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Precompiled", "precompiled_charsmap": "AAQAAAD/////////////////////"},  # breaks when it is read
        {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAAAAAAAAAAAAAAA"},  # at any text
        {"type": "Replace", "pattern": {"Regex": "(a+)+X"}, "content": "x"},  # at this one
    ],
)
def test_a_tokenizer_at_which_its_library_panics_is_told(tmp_path: Path, normalizer: dict[str, Any]) -> None:
    train_bpe([TEXT], 270, tmp_path / "tokenizer")
    file = tmp_path / "tokenizer/tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    told = rf"^data\.tokenizer: the tokenizers library cannot use {file} \(.+\); give another$"
    with pytest.raises(DataError, match=told):
        FileTokenizer(tmp_path / "tokenizer").encode("a" * 100)
    (tmp_path / "a.txt").write_text("a" * 100)
    words = ["data=text", f"data.files=[{tmp_path}/a.txt]", f"data.tokenizer={file.parent}"]
    option = load_config(None, [*words, f"cache_dir={tmp_path}/cache", "data.tokenize_processes=2"]).config.data
    with pytest.raises(DataError, match=told):
        load_data(option, seed=0)
