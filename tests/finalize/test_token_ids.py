"""What checkpoints and ``finalize`` write gives by transformers' ``AutoTokenizer`` the token ids that training saw."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from finalized import refused
from program import forgather, modules_after
from tiny import decoder
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from forgather_cli.checkpoint.tensors import write_model_directory
from forgather_cli.config.schema import SyntheticSettings
from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.data.text.auto_tokenizer import OWN_SPLITS, warn_of_other_ids
from forgather_cli.data.text.piecewise import GPT_2, HARD, LLAMA_3, QWEN_2
from forgather_cli.data.text.tokenizer import FileTokenizer, load_tokenizer, train_bpe
from forgather_cli.finalize.sample import BUILT_IN, MESSAGES
from forgather_cli.models.pretrained import write_model_files

pytestmark = [
    pytest.mark.usefixtures("own_directory"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and what it imports
]

LEARNED = [BUILT_IN, "12 345 1999 2026-11-27 (foo) {bar} x=12345\n\n\tif not 3.14:\n", " don't WE'LL x\r\n" * 9] * 4
QWEN2 = {"attention_bias": True, "attention_output_bias": False}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def by_pattern(directory: Path, pattern: str, *, nfc: bool = False, **config: Any) -> Path:
    """A byte-level BPE that splits by a pattern, with what its tokenizer_config.json says."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=not nfc, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    return _written(tokenizer, directory, SPECIAL, trainer, {"eos_token": SPECIAL[0], **config})


def like_llama_2(directory: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    sequence = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(sequence)
    special = ["<unk>", "<s>", "</s>"]
    of_bytes = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=[*special, *of_bytes], show_progress=False)
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    _written(tokenizer, directory, special, trainer, {"tokenizer_class": "LlamaTokenizer", **names})
    made = Tokenizer.from_file(str(directory / "tokenizer.json"))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(directory / "tokenizer.json"))
    return directory


def _written(tokenizer: Tokenizer, directory: Path, special: list[str], trainer: Any, config: dict[str, Any]) -> Path:
    tokenizer.train_from_iterator(LEARNED, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [each for each in document["added_tokens"] if each["content"] in special]
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(document))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHATML)
    return directory


def word_pieces(directory: Path) -> Path:
    """Cased, which the class is not unless it is told."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[SEP]", "[CLS]"]
    config = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", "clean_up_tokenization_spaces": True}
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    return _written(tokenizer, directory, special, trainer, config)


def unigram(directory: Path) -> Path:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    return _written(tokenizer, directory, special, trainer, {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>"})


def own_bpe(directory: Path) -> Path:
    train_bpe(LEARNED, 700, directory)
    return directory


SOURCES = {
    "own": own_bpe,
    "bytes": lambda directory: load_tokenizer("bytes").save(directory) or directory,
    "no class": lambda directory: by_pattern(directory, LLAMA_3),
    "gpt2": lambda directory: by_pattern(directory, LLAMA_3, tokenizer_class="GPT2Tokenizer"),
    "qwen2": lambda directory: by_pattern(directory, GPT_2, tokenizer_class="Qwen2TokenizerFast"),
    "llama": like_llama_2,
    "bert": word_pieces,
    "t5": unigram,
}


def model_of(directory: Path, tokenizer: FileTokenizer, **shape: Any) -> Path:
    """As a checkpoint has it."""
    model = decoder(vocab_size=tokenizer.vocab_size, **shape)
    directory.mkdir()
    write_model_directory(directory, dict(model.state_dict()))
    write_model_files(model, tokenizer, directory)
    return directory


def texts() -> list[str]:
    draw = random.Random(0)
    words = ["it's", "(foo)", "1999", "345", "x=12", "café", "cafe\u0301", "\n\n\t", "WE'LL", "{bar}"]
    drawn = [" ".join(draw.choices(words, k=9)) for _ in range(100)]
    return [*HARD, BUILT_IN, "cafe\u0301 A\u030angstro\u0308m", *drawn]


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_written_gives_the_ids_of_training(source: str) -> None:
    shape = {"qk_norm": source in ("own", "no class", "qwen2", "t5")}  # a Qwen3, or a Llama
    ours = FileTokenizer(SOURCES[source](Path("tokenizer")))
    model_of(Path("source"), ours, **shape)
    ours.save(Path("copy"))
    assert FileTokenizer(Path("copy")).fingerprint == ours.fingerprint  # caches and runs are known by it
    assert forgather("finalize", "source", "model") == 0
    template = ChatTemplate.of(Path("tokenizer"))
    for directory in ("source", "model"):
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        special = [f"a{ours.decode([n])}b {ours.decode([n])}" for n in ours.all_special_ids]
        for text in [*texts(), *special]:
            ids = ours.encode(text)
            assert theirs.encode(text, add_special_tokens=False) == ids, repr(text)
            assert theirs.encode(text) == [*ours.prefix_tokens, *ids, *ours.suffix_tokens]
            assert theirs.decode(ids) == ours.decode(ids)
        assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_token_id, ours.bos_token_id)
        assert theirs.padding_side == ("left" if source == "llama" else "right")
        if template is not None:
            prompt = template.render(MESSAGES, add_generation_prompt=True)
            made = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
            assert made == ours.encode(prompt)


def test_a_class_that_is_taken_whatever_is_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    ours = FileTokenizer(own_bpe(Path("tokenizer")))
    model_of(Path("source"), ours, **QWEN2)
    theirs = transformers.AutoTokenizer.from_pretrained("source")
    assert sum(theirs.encode(text) != ours.encode(text) for text in texts()) > 90
    message = refused(capsys, "source", "model", code=1)
    kept = transformers.PreTrainedTokenizerFast.from_pretrained("source")
    assert [kept.encode(text) for text in texts()] == [ours.encode(text) for text in texts()]
    for word in ("Qwen2Tokenizer", "data.tokenizer", "attention_output_bias=null", "qk_norm=true"):
        assert word in message


def test_with_a_tokenizer_like_that_class_it_is_not_refused() -> None:
    ours = FileTokenizer(by_pattern(Path("tokenizer"), QWEN_2, nfc=True, tokenizer_class="Qwen2Tokenizer"))
    model_of(Path("source"), ours, **QWEN2)
    assert forgather("finalize", "source", "model") == 0
    theirs = transformers.AutoTokenizer.from_pretrained("model")
    assert type(theirs).__name__ == "Qwen2Tokenizer"
    assert [theirs.encode(text) for text in texts()] == [ours.encode(text) for text in texts()]


def test_the_start_of_a_run_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    by_pattern(Path("like"), QWEN_2, nfc=True)
    by_pattern(Path("unlike"), QWEN_2)
    own = ["model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
    qwen2 = ["model.attention_bias=true", "model.attention_output_bias=false", "model.qk_norm=false"]
    run = ["data=synthetic", "seq_len=16", "num_samples=8", "num_eval_samples=4", "global_batch_size=4", "max_steps=1",
           "save_strategy=no", "callbacks=minimal", "device=cpu"]  # fmt: skip
    theirs = "model.config={model_type: qwen2, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, " \
          "num_key_value_heads: 2, intermediate_size: 16}"  # fmt: skip
    for number, (expected, *words) in enumerate(
        [
            (1, *run, *own, *qwen2),
            (1, *run, *own, *qwen2, "tokenizer=unlike"),
            (0, *run, *own, *qwen2, "tokenizer=like"),
            (0, *run, *own, "model.attention_bias=true", "model.qk_norm=true", "model.attention_output_bias=null"),
            (1, "model=transformers", *run, theirs),
        ]
    ):
        for command in (["plan"], ["train", f"output_dir=run{number}"]):
            caplog.clear()
            assert forgather(command[0], *words, *command[1:]) == 0
            told = [record.message for record in caplog.records if "of type qwen2" in record.message]
            assert len(told) == expected, (command, words)
            assert all("data.tokenizer=" in each and "qk_norm=true" in each for each in told)


def test_to_say_so_imports_no_transformers() -> None:
    told = "warn_of_other_ids(N(config=N(model_type='qwen2')), SyntheticSettings())"
    modules = "forgather_cli.config.schema import SyntheticSettings", "forgather_cli.data.text.auto_tokenizer import *"
    code = "\n".join([*(f"from {each}" for each in ("types import SimpleNamespace as N", *modules)), told])
    assert not {"torch", "transformers", "tokenizers"} & modules_after(code)


def test_the_types_with_a_class_of_their_own_are_those_of_the_library(caplog: pytest.LogCaptureFixture) -> None:
    """And these classes do as the table says."""
    kept = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "MistralCommonBackend")
    found = {
        kind: TOKENIZER_MAPPING_NAMES[kind]
        for kind in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
        if TOKENIZER_MAPPING_NAMES[kind] not in kept
    }
    assert found.keys() == OWN_SPLITS.keys()
    by_pattern(Path("unlike"), LLAMA_3, nfc=True)
    for kind, name in found.items():
        getattr(transformers, name)().save_pretrained(kind)
        model = SimpleNamespace(config=SimpleNamespace(model_type=kind))
        warn_of_other_ids(model, SyntheticSettings(tokenizer=kind))
        assert not caplog.records
        warn_of_other_ids(model, SyntheticSettings(tokenizer="unlike"))
        assert f"of type {kind}" in caplog.text
        caplog.clear()
