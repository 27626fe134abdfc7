"""Rows of some tokens that are trained beside an adapter: against peft, under every strategy, merged, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chats
import pytest
import test_adapters_peft as against_peft
import test_adapters_runs as runs
import test_adapters_strategies as strategies
import tiny
import torch
from finalized import theirs as load_theirs
from lazily import LoraConfig, PeftModel, get_peft_model
from program import forgather
from safetensors.torch import load_file
from selection import some
from test_adapters_peft import IDS, SHAPE, built
from whole_batch import equal

from forgather_cli.adapters.directory import WEIGHTS, read_adapter
from forgather_cli.adapters.load import with_adapter
from forgather_cli.adapters.merge import MergedRows, write_merged
from forgather_cli.adapters.model import adapt
from forgather_cli.checkpoint.load import ADAPTER_PREFIX
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import ModelError
from forgather_cli.inference.source import locate
from forgather_cli.models.build import fill

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_directory")]  # peft's, of transformers

ROWS = {"tied": "[9,2,33]", "untied": "{embed_tokens: [9,2], lm_head: [9,2]}", "embedding": "[9,2]"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for name in ROWS:
        tiny.llama(**SHAPE, tie_word_embeddings=name == "tied").save_pretrained(root / name)
    return {name: root / name for name in ROWS}


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("model", ["pretrained", "transformers"])
def test_forward_gradients_files_and_merge_are_those_of_peft(
    case: str, model: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    words = ("adapter=lora", "target_modules=[q_proj]", f"adapter.trainable_token_indices={ROWS[case]}")
    config = against_peft.config_of(bases[case], *words, model=model)
    mine = against_peft.stirred(against_peft.ours(config))
    theirs = against_peft.assert_as_peft(mine, against_peft.saved(mine, config, tmp_path / "adapter"), bases[case])
    read = with_adapter(built(config), read_adapter(tmp_path / "theirs"))
    torch.testing.assert_close(read(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    rows = MergedRows(mine)
    assert not rows.is_untied
    against_peft.assert_merged_as_peft(rows, theirs)


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Models that are tied, and not."""
    found = {}
    for tied in (True, False):
        found[tied] = tmp_path_factory.mktemp("tied" if tied else "untied")
        tiny.llama(**SHAPE | {"vocab_size": 260}, tie_word_embeddings=tied).save_pretrained(found[tied])
        load_tokenizer("bytes").save(found[tied])
    return found


@pytest.fixture(scope="module")
def alone(with_tokenizer: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """Of each base: its directory, the settings, and what one device trains."""
    found = {}
    for tied, base in with_tokenizer.items():
        ids = "[101,97,32]" if tied else "{embed_tokens: [101,97,32], lm_head: [101,97,32]}"
        words = ("adapter=lora", "adapter.target_modules=[v_proj]", f"adapter.trainable_token_indices={ids}")
        found[tied] = base, words, strategies.train(tmp_path_factory.mktemp("alone"), base, *words)
    return found


@pytest.mark.parametrize(
    ("tied", "layout"), [(True, "ddp"), (True, "fsdp2"), (False, "ddp"), (False, "fsdp2"), (False, "pipeline")]
)
def test_every_strategy_agrees_with_one_device(tied: bool, layout: str, alone: Any, tmp_path: Path) -> None:
    base, words, reference = alone[tied]
    assert sum("token_adapter" in each for each in reference[1]) == (1 if tied else 2)
    strategies.assert_ranks_as_alone(reference, tmp_path, base, *words, *strategies.LAYOUTS[layout])


POOR = ["<|endoftext|>"]


def chat_words(base: str, *more: str) -> tuple[str, ...]:
    return (
        "train", "model=pretrained", f"model.path={base}", "data=instruct", "data.files=[chats.jsonl]", "seq_len=96",
        "data.eval_fraction=0.2", "eval_strategy=no", "optimizer=adamw", "learning_rate=1e-2", "global_batch_size=4",
        "max_steps=4", "callbacks=minimal", "output_dir=run", "device=cpu", "adapter=lora", *more,
    )  # fmt: skip


@pytest.mark.parametrize("tied", some([True, False], True))
def test_tokens_of_a_chat_template_are_learned_in_spare_rows(tied: bool, capfd: pytest.CaptureFixture[str]) -> None:
    chats.write_chats(Path("chats.jsonl"), 40)
    tokens = len(chats.write_tokenizer(Path("base"), CHATML, POOR))
    plain = chats.write_model(Path("base"), "llama", tokens + 6, tie_word_embeddings=tied)
    new = [tokens, tokens + 1]
    assert forgather(*chat_words("base", "adapter.target_modules=[q_proj]", "precision=bf16")) == 0
    assert "rows of 2 tokens are trained" in capfd.readouterr().err
    saved, settings = load_file(runs.newest("run") / WEIGHTS), read_adapter(runs.newest("run")).settings
    layers = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    assert settings.trainable_token_indices == (new if tied else {"embed_tokens": new, "lm_head": new})
    for name in layers:
        learned = saved[f"{ADAPTER_PREFIX}{name}.token_adapter.trainable_tokens_delta"]
        mean = plain.get_submodule(name).weight[:tokens].bfloat16().float().mean(0).expand(2, -1)
        assert learned.dtype == torch.float32
        assert 1e-3 < (learned - mean).abs().max() < 0.1  # four steps from there
    assert forgather("finalize", "run", "merged", "--merge", "--text", str(Path(__file__))) == 0
    ids = torch.tensor([[3, tokens, 4, 1, tokens + 1, 9, 2, 6]])
    apart = PeftModel.from_pretrained(load_theirs("base"), runs.newest("run")).eval()
    merged = load_theirs("merged")
    torch.testing.assert_close(merged(ids).logits, apart(ids).logits, rtol=1e-4, atol=1e-4)
    assert (merged(ids).logits - plain(ids).logits)[..., new].abs().max() > 0.01
    assert merged.config.tie_word_embeddings == tied
    before, after = load_file("base/model.safetensors"), load_file("merged/model.safetensors")
    assert before.keys() == after.keys()
    known = [row for row in range(tokens + 6) if row not in new]
    for name, tensor in before.items():
        rows = known if name.removesuffix(".weight") in layers else slice(None)
        assert "q_proj" in name or torch.equal(tensor[rows], after[name][rows]), name
    runs.assert_same_eval_losses(capfd, ("run", "merged"), *chat_words("base")[3:7])
    on = ("adapter.target_modules=[q_proj]", "adapter.from_adapter=run/x", "learning_rate=0", "output_dir=on")
    Path("run/x").symlink_to(runs.newest("run").resolve())
    assert forgather(*chat_words("base", *on)) == 0
    assert equal(load_file(runs.newest("on") / WEIGHTS), saved)


def test_tokens_without_rows_are_added_to_the_base_first(capfd: pytest.CaptureFixture[str]) -> None:
    chats.write_chats(Path("chats.jsonl"), 40)
    tokens = len(chats.write_tokenizer(Path("base"), CHATML, POOR))
    chats.write_model(Path("base"), "llama", tokens)
    assert forgather(*chat_words("base")) == 2
    assert "(forgather finalize BASE GROWN --add-tokens FILE, model.path=GROWN)" in " ".join(
        capfd.readouterr().err.split()
    )
    Path("tokens.txt").write_text("<|im_start|>\n<|im_end|>\n")
    assert forgather("finalize", "base", "grown", "--add-tokens", "tokens.txt") == 0
    ids = f"adapter.trainable_token_indices={{embed_tokens: [{tokens},{tokens + 1}], lm_head: [{tokens},{tokens + 1}]}}"
    assert forgather(*chat_words("grown", ids)) == 0
    assert "rows of 2 tokens are trained: model.embed_tokens, lm_head" in capfd.readouterr().err


ENDS = {
    "head": "target_modules=[lm_head]", "embedding": "target_modules=[embed_tokens]",
    "whole head": "trainable=[lm_head]", "whole embedding": "trainable=[embed_tokens]",
    "rows": "adapter.trainable_token_indices=[3,9]",
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("tied", [True, False])
def test_ends_of_a_model_are_read_and_merged_as_they_were_trained(
    end: str, tied: bool, with_tokenizer: dict[bool, Path]
) -> None:
    base = with_tokenizer[tied]
    targets = [] if "target_modules" in ENDS[end] else ["target_modules=[q_proj]"]
    config = against_peft.config_of(base, "adapter=lora", ENDS[end], *targets)
    if tied and end.startswith("whole"):
        with pytest.raises(ModelError, match=r"embed_tokens.weight = lm_head.weight is one"):
            against_peft.ours(config)
        return
    mine = against_peft.stirred(against_peft.ours(config))
    files = against_peft.saved(mine, config, Path("adapter"))
    logits = mine(IDS)
    theirs = PeftModel.from_pretrained(load_theirs(base), files).eval()
    torch.testing.assert_close(theirs(IDS).logits, logits, rtol=1e-5, atol=1e-5)
    write_merged(locate(files), read_adapter(files), Path("merged"))
    merged = load_theirs("merged")
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-5, atol=1e-5)
    assert merged.config.tie_word_embeddings == (tied and end not in ("head", "embedding"))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_one_of_two_that_share_a_weight_trained_by_peft_is_refused(name: str, with_tokenizer: dict[bool, Path]) -> None:
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[name], task_type="CAUSAL_LM")
    theirs = against_peft.stirred(get_peft_model(load_theirs(with_tokenizer[True]), settings))
    theirs.save_pretrained("peft")
    config = against_peft.config_of(with_tokenizer[True])
    with pytest.raises(ModelError, match="was trained apart from what shares it"):
        with_adapter(built(config), read_adapter(Path("peft")))


@pytest.mark.parametrize("model", ["pretrained", "transformers"])
def test_rows_of_added_tokens_are_the_bases_beside_an_adapter(model: str, bases: dict[str, Path]) -> None:
    config = against_peft.config_of(bases["tied"], "adapter=lora", model=model)
    filled = built(config)
    fill(config, torch.device("cpu"), filled, 0, num_known=SHAPE["vocab_size"] - 2)
    for name, tensor in load_theirs(bases["tied"]).state_dict().items():
        assert torch.equal(filled.state_dict()[name], tensor), name


LEFT_OUT = {
    ("target_modules=[lm_head]",): "lm_head is trained otherwise",
    ("loss=linear_cross_entropy",): "loss=linear_cross_entropy multiplies with the head's weight itself",
    ("trainer=pipeline", "n_microbatches=2"): "under trainer=pipeline lm_head is on another stage",
}


@pytest.mark.parametrize("given", LEFT_OUT)
def test_rows_that_cannot_be_trained_are_said_or_refused(given: tuple[str, ...], bases: dict[str, Path]) -> None:
    """Said of tokens that the data add, refused where somebody asked for them."""

    def account(*more: str) -> str:
        config = against_peft.config_of(bases["tied"], "adapter=lora", *given, *more)
        model = against_peft.on_meta(config)
        model.new_tokens = range(38, 40)
        said = adapt(model, config.adapter, config)
        assert not any("token_adapter" in name for name, _ in model.named_parameters())
        return "\n".join(said)

    assert f"the rows of 2 added tokens stay as the base has them: {LEFT_OUT[given]}" in account()
    assert "stay as the base has them: trainable_token_indices" in account("adapter.trainable_token_indices=[]")
    with pytest.raises(ModelError, match=LEFT_OUT[given]):
        account("adapter.trainable_token_indices=[38]")
