"""Small models with their tokenizers, and GGUF files of them, right ones and wrong ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny import decoder
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from forgather_cli.checkpoint.tensors import Weights, write_model_directory
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.finalize.sample import BUILT_IN
from forgather_cli.gguf.contents import contents_of
from forgather_cli.gguf.options import GgufType
from forgather_cli.gguf.prove import prove, prove_structure
from forgather_cli.gguf.write import Contents, write_gguf
from forgather_cli.models.pretrained import write_config

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
STOP = ["<|finish|>", "<|turn|>"]
SPECIAL = ["<|begin|>", "<|finish|>", "<|turn|>"]  # none is known to llama.cpp by its text
TEXTS = [BUILT_IN, "def f(x):\n    return x ** 2\n" * 3, "it's 1234567 o'clock, they'RE 99 11"]
Change = Callable[[Contents], Contents]


def byte_level(directory: Path, pattern: str = LLAMA3, *, ignore_merges: bool = False, bos: bool = False) -> Path:
    """A byte-level BPE that splits by a pattern, as Llama 3's and Qwen's."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _finish(tokenizer, directory, SPECIAL, bos=bos)


def sentencepiece(directory: Path, kind: str) -> Path:
    """``bpe``, as Llama 2's, or ``unigram``, as T5's."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
        of_bytes = [f"<0x{n:02X}>" for n in range(256)]
        trainer: Any = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=[*special, *of_bytes])
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
        trainer = trainers.UnigramTrainer(
            vocab_size=300, show_progress=False, special_tokens=special, unk_token="<unk>"
        )
    tokenizer.train_from_iterator(TEXTS, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [each for each in document["added_tokens"] if each["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(document))  # trained with splitting, used as SentencePiece's are
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _finish(tokenizer, directory, special[1:], bos=True)


def _finish(tokenizer: Tokenizer, directory: Path, special: list[str], *, bos: bool) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens(special)
    if bos:
        begin = (special[0], tokenizer.token_to_id(special[0]))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[begin])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = f'{{"bos_token": "{special[0]}", "eos_token": "{special[1]}"}}'
    (directory / "tokenizer_config.json").write_text(names)
    return directory


def edit_tokenizer(directory: Path, edit: Callable[[Any], None]) -> None:
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    edit(document)
    path.write_text(json.dumps(document), encoding="utf-8")


@dataclass(frozen=True)
class Made:
    """A model directory, and what a file of it holds."""

    directory: Path
    tokenizer: Any
    stop: list[int]
    contents: Contents

    def prove(self, file: Path, kind: GgufType, change: Change = lambda contents: contents, length: int = 96) -> Any:
        """Write a file of what ``change`` makes of the contents, and have llama.cpp read it."""
        file.unlink(missing_ok=True)
        write_gguf(file, change(self.contents), kind)
        ids = self.tokenizer.encode("".join(TEXTS))[:length]
        return prove(file, self.directory, self.tokenizer, [ids], kind, self.stop)

    def prove_structure(self, change: Change = lambda contents: contents, length: int = 96) -> Any:
        """That of what ``change`` makes of the contents."""
        ids = self.tokenizer.encode("".join(TEXTS))[:length]
        return prove_structure(self.directory, change(self.contents), self.tokenizer, [ids], self.stop)


def made(directory: Path, stop: list[str], **shape: Any) -> Made:
    """A random model for the tokenizer in a directory; a text ends at the tokens ``stop``."""
    tokenizer = load_tokenizer(str(directory))
    settings = {"initializer_range": 0.15, "max_position_embeddings": 256, **shape}
    model = decoder(vocab_size=tokenizer.vocab_size, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    tensors = dict(model.state_dict())
    if settings.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    write_model_directory(directory, tensors)
    ids = [tokenizer.encode(token)[0] for token in stop]
    special = SimpleNamespace(eos_token_id=ids[0], bos_token_id=tokenizer.bos_token_id)
    write_config(directory, model.settings, special)
    return Made(directory, tokenizer, ids, contents_of(directory, tokenizer, ids, {"general.name": "made"}))


@dataclass
class _Changed:
    """Weights of which one tensor is another."""

    weights: Weights
    name: str
    change: Callable[[torch.Tensor], torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.weights.read(name, start, stop)
        return self.change(tensor) if name == self.name else tensor


def rope_base(contents: Contents) -> Contents:
    model = contents.architecture
    is_usual = model.metadata[f"{model.name}.rope.freq_base"] == 10000.0
    return other_value("rope.freq_base", 500000.0 if is_usual else 10000.0)(contents)


def other_value(key: str, value: float) -> Change:
    """A file whose metadata say something else than the source's config."""

    def change(contents: Contents) -> Contents:
        model = contents.architecture
        return replace(contents, architecture=replace(model, metadata={**model.metadata, f"{model.name}.{key}": value}))

    return change


def unpaired(contents: Contents) -> Contents:
    return replace(contents, architecture=replace(contents.architecture, changes={}))


def shifted(contents: Contents) -> Contents:
    """The rows of the last matrix of an attention's end come one later."""
    ends = re.compile(r"(o_proj|attn\.c_proj|dense)\.weight$")
    name = [name for name in contents.weights.names if ends.search(name)][-1]
    return _changed(contents, name, lambda tensor: tensor.roll(1, 0))


def scaled(ending: str, factor: float, at: int | None = None) -> Change:
    """One tensor, or one of its numbers."""

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        factors = torch.ones(tensor.numel())
        factors[slice(None) if at is None else at] = factor
        return tensor * factors.view(tensor.shape)

    return lambda contents: _changed(contents, next(n for n in contents.weights.names if n.endswith(ending)), scale)


def _changed(contents: Contents, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Contents:
    weights: Any = _Changed(contents.weights, name, change)
    return replace(contents, weights=weights)


def other_splitting(contents: Contents) -> Contents:
    other = "qwen2" if contents.metadata["tokenizer.ggml.pre"] != "qwen2" else "gpt-2"
    return replace(contents, metadata={**contents.metadata, "tokenizer.ggml.pre": other})


def end_left_out(contents: Contents) -> Contents:
    kept = {key: value for key, value in contents.metadata.items() if key != "tokenizer.ggml.eot_token_id"}
    return replace(contents, metadata=kept)
