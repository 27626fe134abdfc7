"""A recipe on top of a recipe: which of two files wins, what is left behind, and which file a value comes from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml
from program import forgather, printed, refusal, shown, write

from forgather_cli.config.decode import dump_tree, load_saved
from forgather_cli.config.explain import explain
from forgather_cli.config.load import load_config
from forgather_cli.errors import ConfigError

CHATS = ["model.path=/nowhere", "data.files=[c.jsonl]"]
SPELLINGS = ("seq_len: {}\n", "data: {{seq_len: {}}}\n", "data.seq_len: {}\n")


def recipe(path: Path, *defaults: str, body: str) -> Path:
    return write(path, f"# Mine.\ndefaults: [{', '.join(defaults)}]\n{body}")


def problems(name: str, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(name, words)
    assert caught.value.exit_code == 2
    return caught.value.problems


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_nested_setting_beside_a_shipped_recipe_s_bare_key() -> None:
    recipe(Path("recipes/chats.yaml"), "chat_finetune", "_self_", body="data: {seq_len: 128, packing: pad}\n")
    data = load_config("chats", CHATS).config.data
    assert (data.seq_len, data.packing) == (128, "pad")
    recipe(Path("recipes/longer.yaml"), "pretrain_60m", "_self_", body="lr_scheduler: {warmup_steps: 7}\n")
    scheduler = load_config("longer", []).config.lr_scheduler
    assert (scheduler.type, scheduler.warmup_steps) == ("linear", 7)


@pytest.mark.parametrize("parent", SPELLINGS)
@pytest.mark.parametrize("child", SPELLINGS)
def test_a_child_wins_in_any_spelling_from_any_place_and_the_command_line_over_all(parent: str, child: str) -> None:
    recipe(Path("recipes/oldest.yaml"), "train", "_self_", body=parent.format(64) + "packing: concat\n")
    recipe(Path("recipes/middle.yaml"), "oldest", "_self_", body="max_steps: 3\n")
    Path("dir").mkdir()
    for file, defaults in {
        "recipes/child.yaml": ("middle", "_self_"), "recipes/first.yaml": ("_self_", "middle"),
        "dir/recipes/deep.yaml": ("middle",), "dir/flat.yaml": ("oldest", "_self_"), "elsewhere/x.yaml": ("middle",),
    }.items():  # fmt: skip
        own = recipe(Path(file), *defaults, body=child.format(32))
        name = str(own) if "elsewhere" in file else own.stem
        loaded = load_config(name, [], config_dir=Path("dir"))
        assert (loaded.config.data.seq_len, loaded.config.data.packing) == (32, "concat")
    for typed in ("seq_len=16", "data.seq_len=16"):
        assert load_config("child", [typed]).config.data.seq_len == 16
    assert load_saved(write(Path("run/config.yaml"), dump_tree(loaded.tree))).data.seq_len == 32
    recipe(Path("recipes/youngest.yaml"), "child", "_self_", body=parent.format(24))
    assert load_config("youngest", []).config.data.seq_len == 24


def test_an_option_of_another_folder_counts_where_it_is_chosen() -> None:
    write(Path("conf/experiment/short.yaml"), "# @package _global_\ndata: {seq_len: 16}\nmax_steps: 5\n")
    recipe(Path("recipes/base.yaml"), "train", "_self_", body="seq_len: 64\nmax_steps: 9\n")
    recipe(Path("recipes/child.yaml"), "base", "experiment: short", "_self_", body="max_steps: 7\n")
    config = load_config("child", []).config
    assert (config.data.seq_len, config.max_steps) == (16, 7)
    config = load_config("base", ["+experiment=short"]).config
    assert (config.data.seq_len, config.max_steps) == (16, 5)


def test_what_a_recipe_requires_is_asked_for_until_somebody_says_it() -> None:
    for body in (each.format("'???'") for each in SPELLINGS):
        recipe(Path("recipes/asks.yaml"), "default", "_self_", body=body)
        assert problems("asks") == ["data.seq_len: required by data=python_stdlib; set data.seq_len=..."]
        assert load_config("asks", ["seq_len=16"]).config.data.seq_len == 16
        for answer in (each.format(32) for each in SPELLINGS):
            recipe(Path("recipes/answers.yaml"), "asks", "_self_", body=answer)
            assert load_config("answers", []).config.data.seq_len == 32
    [said] = problems("pretrain_1b_accelerate")
    assert said.startswith("trainer.accelerate_config: required")


def test_one_setting_spelled_twice_in_a_file_is_a_mistake_that_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(Path("recipes/base.yaml"), "train", "_self_", body="seq_len: 64\n")  # another file may
    names = {SPELLINGS[0]: "seq_len", SPELLINGS[1]: "data.seq_len", SPELLINGS[2]: "data.seq_len"}
    for one, other in itertools.permutations(SPELLINGS, 2):
        file = recipe(Path("recipes/twice.yaml"), "base", "_self_", body=one.format(16) + other.format(32))
        said = refusal(capsys, "config", "show", "twice")
        assert all(name in said for name in ("set twice", names[one], names[other], str(file.resolve())))
    body = "groups: {a: {regex: a}}\noptimizer: {groups: {a: {settings: {lr: 1.0}}}}\n"
    recipe(Path("recipes/twice.yaml"), "base", "_self_", body=body)
    assert any(each.startswith("groups: set twice, optimizer.groups") for each in problems("twice"))


@pytest.mark.parametrize("body", ["add_tokens: false\n", "data: {add_tokens: false}\n", "data.add_tokens: false\n"])
def test_what_a_parent_sets_of_an_option_that_a_child_replaces_is_left_behind_and_said(
    body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe(Path("recipes/parent.yaml"), "chat_finetune", "_self_", body=body)
    child = ("parent", "{override data: text}", "{override lr_scheduler: constant}", "_self_")
    recipe(Path("recipes/child.yaml"), *child, body="isolate_documents: true\n")
    words = ["child", "model.path=/nowhere", "data.files=[a.txt]"]
    loaded = load_config(words[0], words[1:])
    data = loaded.config.data
    assert (data.type, data.seq_len, data.packing, data.isolate_documents) == ("text", 1024, "best_fit", True)
    assert loaded.config.lr_scheduler.warmup_steps == 0.03, "constant has it too"
    [note] = loaded.notes
    assert "data.add_tokens" in note
    assert all(text in note for text in ("parent.yaml", "data=instruct", "data=text", "child.yaml"))
    out = shown(capsys, "config", "show", *words)
    assert "data.add_tokens" in out.splitlines()[0]
    assert yaml.safe_load(out) == {**loaded.tree, "output_dir": yaml.safe_load(out)["output_dir"]}
    # of a child that chooses nothing it stays, as does what the child says for its own option, which is a mistake
    assert load_config("parent", CHATS).config.data.add_tokens is False
    recipe(Path("recipes/child.yaml"), *child, body=body)
    [said] = problems(*words)
    assert said.startswith(("add_tokens: only data=instruct", "data.add_tokens: only data=instruct"))
    recipe(Path("recipes/child.yaml"), *child, body="")
    recipe(Path("recipes/youngest.yaml"), "child", "{override data: instruct}", "_self_", body=body)
    assert load_config("youngest", CHATS).config.data.add_tokens is False


def test_a_mistyped_key_of_a_parent_stays_a_mistake() -> None:
    recipe(
        Path("recipes/parent.yaml"), "train", "_self_", body="warmup_step: 3\ndata: {seqlen: 3}\nn_microbatches: 2\n"
    )
    recipe(
        Path("recipes/child.yaml"), "parent", "{override lr_scheduler: constant}", "{override data: synthetic}",
        "{override trainer: ddp}", "_self_", body="",
    )  # fmt: skip
    said = problems("child")
    assert any(each.startswith("warmup_step: unknown setting") and "warmup_steps" in each for each in said)
    assert any(each.startswith("data.seqlen: unknown setting") and "seq_len" in each for each in said)
    assert any(each.startswith("n_microbatches: only trainer=pipeline") for each in said), (
        "never of its parent's option"
    )
    assert len(said) == 3
    assert all("parent.yaml" in each for each in said)


def test_bare_keys_and_classes_of_one_s_own() -> None:
    write(
        Path("own_nets_l1.py"),
        "class Net:\n    def __init__(self, vocab_size, width=3, depth=2): ...\n"
        "class Other:\n    def __init__(self, vocab_size, width=3): ...\n",
    )
    write(Path("conf/model/own.yaml"), "_target_: own_nets_l1.Net\nwidth: 5\n")
    write(Path("conf/model/other.yaml"), "_target_: own_nets_l1.Other\nwidth: 6\n")
    recipe(Path("recipes/any.yaml"), "train", "_self_", body="width: 7\n")  # of whoever chooses a model that has it
    recipe(Path("recipes/net.yaml"), "any", "{override model: own}", "_self_", body="model: {depth: 4}\n")
    assert load_config("net", []).config.model.kwargs == {"width": 7, "depth": 4}
    assert load_config("any", ["model=own"]).config.model.kwargs == {"width": 7}
    # another class takes what it has
    recipe(Path("recipes/child.yaml"), "net", "{override model: other}", "_self_", body="")
    loaded = load_config("child", [])
    assert loaded.config.model.kwargs == {"width": 7}
    assert [note for note in loaded.notes if note.startswith("model.depth: ")]
    # a class in a recipe takes the place of its parent's option, whose settings go; and goes with an option
    body = "model: {_target_: own_nets_l1.Net, width: 9}\n"
    for sizes in ("hidden_size: 64\n", "model: {hidden_size: 64}\n"):
        recipe(Path("recipes/sized.yaml"), "train", "{override model: nano}", "_self_", body=sizes)
        for own in (body, "model._target_: own_nets_l1.Net\nmodel.width: 9\n"):
            recipe(Path("recipes/inside.yaml"), "sized", "_self_", body=own)
            loaded = load_config("inside", [])
            assert loaded.config.model.kwargs == {"width": 9}
            assert [note for note in loaded.notes if note.startswith("model.hidden_size: ")]
    recipe(Path("recipes/back.yaml"), "inside", "{override model: tiny}", "_self_", body="")
    loaded = load_config("back", [])
    assert (loaded.config.model.type, loaded.config.model.hidden_size) == ("decoder", 256)
    assert any("model._target_" in note and "model=tiny" in note for note in loaded.notes)


def comments(out: str) -> dict[str, str]:
    """By the last name of a setting, the comment on its line."""
    return {line.partition(":")[0].strip(): line.partition("  # ")[2] for line in out.splitlines()}


def test_config_show_names_the_file_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("conf/experiment/x.yaml"), "# @package _global_\nsave_steps: 50\n")
    write(Path("conf/model/wide.yaml"), "defaults: [nano, _self_]\nhidden_size: 96\n")
    recipe(
        Path("recipes/mine.yaml"), "default", "experiment: x", "{override model: wide}", "_self_",
        body="data: {seq_len: 128}\ncallbacks: {textgen: {prompts: ['a: # b', c]}}\n",
    )  # fmt: skip
    words = ["mine", "warmup_steps=3", "optimizer=adamw", "trainable=[head, 'it: # s']"]
    out = shown(capsys, "config", "show", *words)
    expected = {
        "conf/train.yaml": "seed gc_steps", "recipes/default.yaml": "max_steps learning_rate tokenizer_default",
        "conf/experiment/x.yaml": "save_steps", "recipes/mine.yaml": "seq_len prompts",
        "conf/data/python_stdlib.yaml": "packing", "conf/model/wide.yaml": "hidden_size",
        "conf/model/nano.yaml": "num_hidden_layers num_attention_heads", "conf/optimizer/adamw.yaml": "betas",
        "conf/callbacks/default.yaml": "top_k", "the command line": "warmup_steps trainable",
        "": "output_dir recipe tokenizer",  # these follow from others
    }  # fmt: skip
    found = comments(out)
    for source, names in expected.items():
        assert {name: found[name] for name in names.split()} == dict.fromkeys(names.split(), source)
    tree = load_config(words[0], words[1:]).tree
    again = {**tree, "output_dir": yaml.safe_load(out)["output_dir"]}
    assert yaml.safe_load(out) == again
    assert json.loads(shown(capsys, "config", "show", *words, "--json")).keys() == again.keys()
    # of a run: its config, and what is typed or chosen now
    saved = write(Path("run/config.yaml"), out)
    out = shown(capsys, "config", "show", "run", "lr_scheduler=wsd", "seed=1")
    expected = {
        str(saved): "seq_len save_steps", "conf/lr_scheduler/wsd.yaml": "decay_steps", "the command line": "seed",
    }  # fmt: skip
    found = comments(out)
    for source, names in expected.items():
        assert {name: found[name] for name in names.split()} == dict.fromkeys(names.split(), source)
    assert yaml.safe_load(out)["data"] == tree["data"]


def test_long_texts_and_odd_keys_keep_their_meaning_beside_comments(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["word " * 60, "two\nlines\n", "a\u2028b", "", "# no comment", "x\x85y", "a # b"]
    info = {f"{number}: {text[:3]!r}": text for number, text in enumerate(texts)}
    body = yaml.safe_dump({"callbacks": {"tensorboard": {"experiment_info": info}}}, allow_unicode=True)
    recipe(Path("recipes/odd.yaml"), "default", "_self_", body=body)
    out = printed(capsys, "config", "show", "odd").out
    assert yaml.safe_load(out)["callbacks"] == load_config("odd", []).tree["callbacks"]
    assert out.count("# recipes/odd.yaml") == len(info)


def test_config_explain_names_the_recipes_that_set_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    recipe(Path("recipes/mine.yaml"), "chat_finetune", "_self_", body="data: {seq_len: 128}\n")
    write(Path("recipes/broken.yaml"), "seq_len: [\n")
    [found] = explain("seq_len")
    assert found.values["data=instruct"] == 256
    assert (found.recipes["recipes/mine.yaml"], found.recipes["recipes/chat_finetune.yaml"]) == (128, 1024)
    assert "recipes/lora_finetune.yaml" not in found.recipes, "it has it from another file"
    out = shown(capsys, "config", "explain", "seq_len", "learning_rate")
    assert "1024  set in recipes/chat_finetune.yaml" in out
    assert "conf/train.yaml" in out
    assert forgather("config", "explain", "optimizer.groups") == 0
