"""What a tokenizer writes around a text (``<s>``): everywhere as in transformers, and not in runs of before."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chats
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from chats import write_lines
from program import document, forgather
from streams import all_ids
from tiny import metrics
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from forgather_cli.callbacks.textgen import TextgenCallback, encoded
from forgather_cli.checkpoint.compare import compare_configs
from forgather_cli.config.decode import dump_tree, load_tree
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import (
    HfSettings,
    InstructSettings,
    Seq2SeqSettings,
    TextgenSettings,
    TextSettings,
    TokensSettings,
    Ul2Settings,
)
from forgather_cli.data.build import load_data
from forgather_cli.data.cache import Cache, digest
from forgather_cli.data.text import tokenize
from forgather_cli.data.text.corpus import find_corpus
from forgather_cli.data.text.tokenizer import FileTokenizer, load_tokenizer
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.finalize.sample import choose_sample
from forgather_cli.run_dir import RunDir

pytestmark = [pytest.mark.usefixtures("own_directory"), pytest.mark.filterwarnings("ignore")]

BEGIN, END = "<s>", "</s>"
TEMPLATES = {"llama": f"{BEGIN} $A", "both": f"{BEGIN} $A {END}", "end": f"$A {END}", "glm": f"[gMASK] {BEGIN} $A"}
TEXTS = ["Hello, naïve world", " 12  a\n\tb", "a", f"one{END}two", "日本"]
PROMPT = "once upon"
NONE = -100


def write_tokenizer(
    directory: Path, kind: str = "llama", *, spelled: bool = False, config: dict[str, Any] | None = None
) -> Path:
    """A directory whose tokenizer writes by one of ``TEMPLATES``, nothing for another kind; its tokens are bytes.

    ``spelled``: with SentencePiece's spaces and byte tokens, as Llama 2 and Gemma, in place of GPT-2's characters.
    """
    special = [BEGIN, END, "[gMASK]"]
    if spelled:
        letters = "abcdefghijklmnopqrstuvwxyz▁,"
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "is", "▁is"]
        vocab = {word: number for number, word in enumerate(words)}
        made = tokenizers.Tokenizer(models.BPE(vocab, [("i", "s"), ("▁", "is")], unk_token="<unk>", byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ids = [(token, made.token_to_id(token)) for token in special]
    if kind in TEMPLATES:
        template = processors.TemplateProcessing(single=TEMPLATES[kind], pair="$A $B", special_tokens=ids)
        made.post_processor = template
        if kind == "llama" and not spelled:  # as Llama 3 has it
            made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END, **(config or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(told))
    return directory


def write_model(directory: Path, kind: str = "llama") -> Path:
    """A small random Llama with a tokenizer, as transformers saves them."""
    chats.write_model(directory, "llama", 259, initializer_range=0.5, bos_token_id=256, eos_token_id=257)
    return write_tokenizer(directory, kind)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer")


DOCUMENTS = [f"Page {number} says " + "a word " * (number * 5 % 13) for number in range(40)]
NUM_BYTES = len("".join(DOCUMENTS).encode())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in DOCUMENTS])


def text(corpus: Path, directory: Path | str, *, streams: bool = False, **settings: Any) -> TextSettings | HfSettings:
    common: dict[str, Any] = {"seq_len": 32, "tokenizer": str(directory), **settings}
    if streams:
        return HfSettings(data_files=[str(corpus)], streaming=True, **common)
    return TextSettings(files=[str(corpus)], eval_fraction=0.0, cache_dir=str(corpus.parent / "cache"), **common)


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("kind", [*TEMPLATES, "gpt2"])
def test_a_tokenizers_own_rule_is_what_transformers_does(tmp_path: Path, kind: str, spelled: bool) -> None:
    # beside a tokenizer.json these two count for nothing (transformers 5)
    told: list[dict[str, Any]] = [{}, {"add_bos_token": kind != "both", "add_eos_token": True}]
    for number, flags in enumerate(told if kind in ("both", "gpt2") else told[:1]):
        path = write_tokenizer(tmp_path / str(number), kind, spelled=spelled, config=flags)
        ours, theirs = FileTokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
        for each in TEXTS:
            assert [*ours.prefix_tokens, *ours.encode(each), *ours.suffix_tokens] == theirs(each)["input_ids"]
            assert ours.encode_prompt(each) == [*ours.prefix_tokens, *ours.encode(each)]


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize("kind", ["both", "none"])
def test_so_it_is_in_classes_of_families(tmp_path: Path, kind: str, name: str) -> None:
    config = {"tokenizer_class": name, "unk_token": "<unk>", "add_bos_token": kind == "none"}
    path = write_tokenizer(tmp_path / "it", kind, spelled=True, config=config)
    ours, theirs = FileTokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    ids, plain = theirs("abc")["input_ids"], theirs("abc", add_special_tokens=False)["input_ids"]
    assert [*ours.prefix_tokens, *plain, *ours.suffix_tokens] == ids


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_rule_may_be_overruled_and_fingerprints_without_one_are_those_of_before(tmp_path: Path, kind: str) -> None:
    path = write_tokenizer(tmp_path / kind, kind)
    own, never, always = (FileTokenizer(path, add_bos=rule) for rule in (None, False, True))
    assert (never.prefix_tokens, always.prefix_tokens) == ((), (256,))
    content = hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    parts = [content, {"eos": END, "bos": BEGIN, "pad": None}]
    before = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]  # as 0.2 made them
    assert never.fingerprint == before != always.fingerprint
    assert (own.fingerprint == before) is (own.prefix_tokens == ()) is (kind == "gpt2")
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(DataError, match=r"^data\.add_bos: .*bos_token"):
        load_tokenizer(str(path), add_bos=True)


@pytest.mark.parametrize(
    ("kind", "source"),
    [("llama", "files"), ("both", "stream"), ("end", "files"), ("glm", "stream"), ("gpt2", "files")],
)
def test_each_document_is_written_as_a_text_with_one_end(corpus: Path, tmp_path: Path, kind: str, source: str) -> None:
    path = write_tokenizer(tmp_path / kind, kind)
    ids = transformers.AutoTokenizer.from_pretrained(path)(DOCUMENTS)["input_ids"]
    expected = [token for each in ids for token in (each if each[-1] == 257 else [*each, 257])]
    found = all_ids(load_data(text(corpus, path, streams=source == "stream"), seed=0).train)
    assert len(found) > len(expected) - 32
    assert found == expected[: len(found)]
    assert load_data(text(corpus, path, add_bos=False), seed=0).description["train_tokens"] == NUM_BYTES + 40


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
@pytest.mark.parametrize("streams", [False, True])
def test_what_begins_a_document_is_no_target_and_all_else_is(
    corpus: Path, tmp_path: Path, packing: Any, isolate: bool, streams: bool
) -> None:
    path = write_tokenizer(tmp_path / "glm", "glm")
    prefix = FileTokenizer(path).prefix_tokens
    option = text(corpus, path, streams=streams, packing=packing, isolate_documents=isolate)
    begun = 0
    for row in load_data(option, seed=0).train:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        starts = np.diff(row["document_ids"], prepend=-1) != 0 if isolate else [False] * len(ids)
        begun += ids.count(prefix[0])
        for at in range(1, len(ids)):  # nothing predicts the first
            token, label, starts_here = ids[at], labels[at], starts[at]
            if token in prefix or starts_here:
                assert label == NONE
            elif label == NONE:
                assert {*zip(ids[at:], labels[at:], strict=True)} == {(257, NONE)}, "padding"
            else:
                assert label == token
    assert begun > 30, "each document begins so"


SPELLED = [f"{BEGIN}one two", f"{BEGIN} three", "four", BEGIN, f"[gMASK]{BEGIN}five", f"six{BEGIN}"]


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_what_a_text_spells_at_its_beginning_stands_there_once(tmp_path: Path, kind: str) -> None:
    path = write_tokenizer(tmp_path / kind, kind)
    tokenizer = FileTokenizer(path)
    begin = list(tokenizer.prefix_tokens)
    bare = [tokenizer.encode(each.removeprefix("[gMASK]" if kind == "glm" else "").removeprefix(BEGIN))
            for each in SPELLED]  # fmt: skip
    assert [tokenizer.encode_prompt(each) for each in SPELLED] == [begin + ids for ids in bare]
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": each} for each in SPELLED])
    expected = [token for ids in bare for token in (*begin, *ids, 257)]
    for streams in (False, True):
        found = all_ids(load_data(text(corpus, path, seq_len=4, streams=streams), seed=0).train)
        assert len(found) > len(expected) - 4
        assert found == expected[: len(found)]
    for packing in ("concat", "best_fit", "pad"):  # and it is no target
        for row in load_data(text(corpus, path, seq_len=16, packing=packing), seed=0).train:
            ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
            starts = [at for at in range(len(ids)) if ids[at : at + len(begin)] == begin and ids[at - 1] == 257]
            assert all(labels[at + n] == NONE for at in starts for n in range(len(begin)))


def test_runs_of_before_go_on_where_no_text_spells_it(corpus: Path, directory: Path, tmp_path: Path) -> None:
    def formerly(path: Path, tokenizer: Path) -> Any:
        data = load_data(text(path, tokenizer), seed=0)
        identity = {"data": {"fingerprint": data.fingerprint, **data.description}}
        cache = Cache(tmp_path / "cache")
        found = find_corpus(text(path, tokenizer))
        tokens = digest([tokenize._VERSION, found.fingerprint(cache), FileTokenizer(tokenizer).fingerprint])
        before = {"data": {"fingerprint": digest([tokens, 32, "concat", False])}}
        refused, _ = compare_configs(before, identity, {"data"})
        return refused

    spelled = write_lines(tmp_path / "spelled.jsonl", [{"text": each} for each in [*DOCUMENTS, *SPELLED]])
    assert formerly(corpus, directory) == []
    assert formerly(spelled, write_tokenizer(tmp_path / "gpt2", "gpt2")) == []
    [refused] = formerly(spelled, directory)
    assert "other rules" in refused
    assert "resume_components" in refused


def test_conversations_have_what_their_template_writes(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{{ eos_token }}"
    path = write_tokenizer(tmp_path / "llama", config={"chat_template": template + "{% endgeneration %}{% endfor %}"})
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write_lines(tmp_path / "chats.jsonl", [{"messages": talk}] * 3)
    expected = transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(talk)["input_ids"]
    option = InstructSettings(files=["chats.jsonl"], tokenizer=str(path), seq_len=64, cache_dir="cache", packing="pad",
                              eval_fraction=0)  # fmt: skip
    row = load_data(option, seed=0).train[0]["input_ids"].tolist()
    assert row[: len(expected)] == expected
    assert row.count(256) == 1


def test_tokens_from_elsewhere_are_taken_as_they_are_and_that_is_told(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, warned = FileTokenizer(directory), {}
    for name, prefix in (("with", tokenizer.prefix_tokens), ("without", ())):
        ids = [token for each in DOCUMENTS for token in (*prefix, *tokenizer.encode(each), 257)]
        np.save(tmp_path / f"{name}.npy", np.array(ids, np.uint16))
        for rule in (None, False):
            option = TokensSettings(files=[str(tmp_path / f"{name}.npy")], tokenizer=str(directory), seq_len=16,
                                    cache_dir=str(tmp_path), eval_fraction=0.0, add_bos=rule)  # fmt: skip
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert all_ids(load_data(option, seed=0).train) == ids[: len(ids) // 16 * 16]
            warned[name, rule] = "data.add_bos" in caplog.text
    assert [case for case, is_so in warned.items() if is_so] == [("without", None)]


def test_encoder_decoders_read_no_such_token(directory: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"input": "one", "target": "two"}\n' * 4)
    common: dict[str, Any] = {"tokenizer": str(directory), "cache_dir": str(tmp_path / "cache"), "eval_fraction": 0.0}
    lengths: dict[str, Any] = {"max_encoder_length": 64, "max_decoder_length": 64, "packing": "pad"}
    pairs = Seq2SeqSettings(files=[str(tmp_path / "pairs.jsonl")], **common, **lengths)
    masked = Ul2Settings(source="text", files=[str(corpus)], max_seq_length=64, **common, **lengths)
    streamed = Ul2Settings(source="hf", data_files=[str(corpus)], streaming=True, max_seq_length=64,
                           tokenizer=str(directory), eval_split="train", **lengths)  # fmt: skip
    for option in (pairs, masked, streamed):
        data = load_data(option, seed=0, num_sentinels=32)
        assert data.tokenizer.encode_prompt("a") == data.tokenizer.encode("a")
        rows = itertools.islice(data.train, 4)
        assert not any(256 in row[side] for row in rows for side in ("input_ids", "labels"))
    with pytest.raises(ConfigError, match=r"data\.add_bos"):
        load_config("qwen3_encdec_small", [f"data.tokenizer={directory}", "data.add_bos=true"])


def greedy(capsys: pytest.CaptureFixture[str], source: Path | str, prompt: str = PROMPT) -> str:
    told = ["--prompt", prompt, "--greedy", "--max-new-tokens", "12", "--device", "cpu"]
    return str(document(capsys, "generate", str(source), *told)["text"])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generate_writes_what_the_pipeline_of_transformers_writes(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "model", kind)
    pipeline = transformers.pipeline("text-generation", model=str(path), device="cpu")
    (expected,) = pipeline(PROMPT, do_sample=False, max_new_tokens=12, return_full_text=False)
    assert greedy(capsys, path) == expected["generated_text"]
    if kind == "llama":
        assert greedy(capsys, path, BEGIN + PROMPT) == expected["generated_text"]


def test_prompts_of_a_run_begin_as_its_texts(directory: Path, tmp_path: Path) -> None:
    callback = TextgenCallback(TextgenSettings(prompts=[PROMPT, ""]), RunDir(tmp_path))
    plain = SimpleNamespace(strategy=SimpleNamespace(parts=[None]))
    for rule, prefix in ((None, [256]), (False, [])):
        tokenizer = FileTokenizer(directory, add_bos=rule)
        assert encoded(plain, callback.prompts, tokenizer) == [[*prefix, *tokenizer.encode(PROMPT)], [256]]
    spelled = encoded(plain, [BEGIN + PROMPT, BEGIN], FileTokenizer(directory))
    assert spelled == [[256, *tokenizer.encode(PROMPT)], [256]]


def test_an_evaluation_counts_each_byte_once_and_no_first_token(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(path).eval()
    total, count = 0.0, 0
    for each in DOCUMENTS:
        ids = torch.tensor([[256, *FileTokenizer(path).encode(each), 257]])
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    words = ["data=text", f"data.files=[{corpus}]", "packing=pad", "seq_len=128", "device=cpu", "cache_dir=cache"]
    found = document(capsys, "eval", str(path), *words)
    assert (found["eval_targets"], found["eval_bytes"]) == (count, NUM_BYTES) == (NUM_BYTES + 40, NUM_BYTES)
    assert math.isclose(found["eval_loss"], total / count, rel_tol=1e-5)
    assert math.isclose(found["eval_bits_per_byte"], total / math.log(2) / NUM_BYTES, rel_tol=1e-5)


def test_a_proof_reads_texts_as_the_model_does(directory: Path, tmp_path: Path) -> None:
    words = "once upon a time there was a king " * 20
    for name, content in (("plain", words), ("spelled", BEGIN + words)):
        (tmp_path / f"{name}.txt").write_text(content)
    files = [tmp_path / "plain.txt", tmp_path / "spelled.txt"]
    texts = [choose_sample(file, None, FileTokenizer(directory), 64).sequences for file in files]
    plain, spelled = ([ids.tolist() for ids, _ in each] for each in texts)
    assert plain == spelled
    for rule, begins in ((None, True), (False, False)):
        sample = choose_sample(None, None, FileTokenizer(directory, add_bos=rule), 64)
        assert all((int(ids[0, 0]) == 256) == begins for ids, _ in sample.sequences)
        assert max(ids.shape[1] for ids, _ in sample.sequences) == 64


def test_a_run_saved_without_the_setting_goes_on_as_it_was(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model")
    words = [
        "finetune", f"model.path={model}", "data=text", f"data.files=[{corpus}]", "seq_len=32", "cache_dir=cache",
        "device=cpu", "precision=fp32", "callbacks=minimal", "global_batch_size=4", "logging_steps=1",
        "per_device_train_batch_size=4", "save_steps=2", "max_eval_samples=8",
    ]  # fmt: skip
    assert forgather("train", *words, "max_steps=4", "data.add_bos=false", "output_dir=whole") == 0
    assert forgather("train", *words, "max_steps=1", "output_dir=new") == 0
    shutil.copytree("whole", "old")
    shutil.rmtree("old/checkpoints/step-00000004")
    config = load_tree(Path("old/config.yaml"))
    assert config["data"].pop("add_bos") is False
    Path("old/config.yaml").write_text(dump_tree(config))
    assert forgather("resume", "old") == 0
    whole, old, new = ({each["step"]: each.get("loss") for each in metrics(Path(n))} for n in ("whole", "old", "new"))
    assert old == whole
    assert old[1] != new[1]
    assert load_tree(RunDir(Path("old")).newest_config())["data"]["add_bos"] is False
    # it is sampled from and evaluated as it was trained, by its tokenizer's rule nowhere
    shutil.copytree("old/checkpoints/step-00000004/model", "copy")
    assert greedy(capsys, "old") != greedy(capsys, "copy")
    for way in ([], ["data=text", f"data.files=[{corpus}]", "seq_len=32", "cache_dir=cache"]):
        told = document(capsys, "eval", "old", *way)["data"]
        assert told["eval_tokens"] + (0 if way else told["train_tokens"]) == NUM_BYTES + 40
