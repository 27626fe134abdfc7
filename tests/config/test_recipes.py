"""Shipped files: every recipe and every option composes, and the files say what the schema says."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from program import write

from forgather_cli.config import options, schema
from forgather_cli.config.decode import to_tree
from forgather_cli.config.load import load_config
from forgather_cli.config.paths import members, root_keys, settings
from forgather_cli.errors import ConfigError

CONF = options.shipped("conf")
RECIPES = options.shipped("recipes")
PATH, TEXTS = "model.path=/nowhere", ["data=text", "data.files=[a]"]
BASE = ["model=pretrained", PATH]
NEEDS = {
    **{name: [PATH] for name in ("finetune", "qat", "finetune_mix")},
    **{name: [PATH, "data.files=[a]"] for name in ("chat_finetune", "lora_finetune", "qlora_finetune", "dpo")},
    "pretrain_1b_accelerate": ["accelerate_config=fsdp.yaml"],
}
MANDATORY = {
    **dict.fromkeys(("adapter=lora", "adapter=dora", "adapter=qlora"), BASE),
    **{name: [PATH] for name in ("model=pretrained", "model=transformers")},
    **{name: ["files=[a]"] for name in ("data=text", "data=tokens", "data=instruct")},
    "data=preference": ["files=[a]", "loss=dpo"],
    "loss=dpo": ["data=preference", "files=[a]"],
    "data=hf": ["dataset=a"],
    "data=mixture": ["+data.sources.a={type: text, files: [a]}"],
    "data=ul2": ["model=qwen3_encdec"],
    "data=seq2seq": ["model=qwen3_encdec", "files=[a]"],
    "model=qwen3_encdec": ["data=ul2"],
}
SIZES = [f"model={name}" for name in ("nano", "tiny", "60m", "160m", "1b")]
OPTIONS = sorted(f"{group}={file.stem}" for group in options.GROUPS for file in (CONF / group).glob("*.yaml"))


def test_recipes_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    for recipe in (path.stem for path in RECIPES.glob("*.yaml")):
        config = load_config(recipe, NEEDS.get(recipe, []), cwd=tmp_path).config
        assert config.recipe == recipe
        assert config.global_batch_size is not None, "shipped recipes give the same steps in every layout"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Options and recipes of the user's."""
    chosen = "- override model: pretrained\n  - _self_\nmodel: {path: /nowhere}\n"
    files = {
        "conf/model/mine.yaml": "# Mine.\ndefaults: [pretrained, _self_]\npath: /nowhere\n",
        "recipes/from_scratch.yaml": f"# Mine.\ndefaults:\n  - pretrain_60m\n  {chosen}",
        "recipes/from_train.yaml": f"# Mine.\ndefaults:\n  - train\n  {chosen}",
        "recipes/own_rate.yaml": f"# Mine.\ndefaults:\n  - pretrain_60m\n  {chosen}learning_rate: 1.0e-5\n",
        "recipes/own_finetune.yaml": "# Mine.\ndefaults: [finetune, _self_]\nmax_steps: 3\n",
    }
    for name, text in files.items():
        write(tmp_path / name, text)
    return tmp_path


def test_weights_without_a_recipe_are_fine_tuned_and_it_is_said(own: Path) -> None:
    for choice in (["model=pretrained", PATH], ["model=transformers", PATH], ["model=mine"]):
        words = [*choice, *TEXTS, "num_train_epochs=2"]
        found = load_config(None, words, cwd=own)
        by_name = load_config("finetune", words, cwd=own).config
        assert found.config == dataclasses.replace(by_name, output_dir=found.config.output_dir)
        assert (found.config.learning_rate, found.config.optimizer.type) == (2e-5, "adamw")
        assert str(found.config.output_dir).startswith("outputs/finetune/")
        [note] = found.notes
        assert re.search(r"finetune\b.*model\.path=/nowhere", note)
    assert load_config(None, [*words, "learning_rate=1e-3", "optimizer=muon"], cwd=own).config.learning_rate == 1e-3
    for without in ([], ["model=nano"], ["model=transformers", "model.config={model_type: gpt2}"]):
        found = load_config(None, without, cwd=own)
        assert (found.recipe, found.notes) == ("default", ())


def test_settings_for_fresh_weights_are_warned_of_on_given_ones(own: Path) -> None:
    for recipe, words in {
        **dict.fromkeys(("default", "pretrain_60m"), BASE),
        "from_scratch": [],  # a user's, with the rate of a shipped one
        "from_train": [],  # with that of train.yaml
        "qwen3_encdec_small": ["model.init_from=/nowhere"],
    }.items():
        found = load_config(recipe, words, cwd=own)
        [note] = found.notes
        assert note.startswith(f"warning: learning_rate={found.config.learning_rate} ")
        assert f"optimizer={found.config.optimizer.type}" in note
        assert "=/nowhere" in note
        assert "learning_rate=2e-05" in note
    # two sides without a recipe: the recipe finetune has sequences of one side
    [note] = load_config(None, ["model=qwen3_encdec", "model.init_from=/nowhere", "data=ul2"], cwd=own).notes
    assert re.match(r"warning: learning_rate=0\.005 .*model\.init_from=/nowhere", note)
    assert "finetune" not in note


def test_a_rate_that_was_chosen_for_weights_is_not_warned_of(own: Path) -> None:
    for recipe, words in {
        **{name: [PATH] for name in ("finetune", "qat", "own_finetune")},
        "chat_finetune": [PATH, "data.files=[b]"],
        "qwen3_encdec_ul2": ["model.init_from=/nowhere"],
        "own_rate": [],
        "pretrain_60m": [*BASE, "learning_rate=1e-4"],  # as typed
    }.items():
        assert load_config(recipe, words, cwd=own).notes == ()


@pytest.mark.parametrize(
    ("words", "tokenizer"),
    [
        ([], "bpe"), (TEXTS, "bpe"), (["data=hf", "dataset=a"], "bpe"),
        (["tokenizer_default=bytes"], "bytes"), (["tokenizer=bytes"], "bytes"), (["tokenizer=theirs"], "theirs"),
        (BASE, "/nowhere"), (["data=hf", "dataset=a", "streaming=true"], "bytes"),
        (["data=tokens", "data.files=[a]"], "bytes"), (["data=synthetic"], "bytes"),
        (["data=instruct", "data.files=[a]", "data.chat_template=chatml"], "bytes"),
        (["model=qwen3_encdec", "data=seq2seq", "data.files=[a]"], "bytes"),
        (["model=qwen3_encdec", "data=ul2"], "bytes"),
    ],
)  # fmt: skip
def test_a_recipe_s_tokenizer_is_for_a_corpus_where_nothing_else_names_one(
    own: Path, words: list[str], tokenizer: str
) -> None:
    for recipe in (None, "pretrain_60m"):  # which has a bpe_vocab_size
        assert getattr(load_config(recipe, words).config.data, "tokenizer", None) == tokenizer
    write(own / "plain.yaml", "defaults: [train, _self_]\n")
    plain = load_config("plain.yaml", words, cwd=own).config.data.tokenizer
    assert plain == ("bytes" if tokenizer == "bpe" else tokenizer)


def test_the_size_of_a_bpe_that_is_not_trained_is_a_mistake_of_who_types_it_or_of_the_recipe(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"^bpe_vocab_size: nothing reads it with tokenizer=/nowhere"):
        load_config("pretrain_60m", [*BASE, "bpe_vocab_size=300"])
    write(own / "mine.yaml", "defaults: [train, {override data: hf}, _self_]\ndataset: a\nbpe_vocab_size: 300\n")
    for words in ([], ["model=nano"], ["model.hidden_size=64"]):
        with pytest.raises(ConfigError, match=r"^bpe_vocab_size: nothing reads it with tokenizer=bytes"):
            load_config("mine.yaml", words, cwd=own)
    for words in (["tokenizer_default=bpe"], ["tokenizer_default=bpe", "streaming=true"], BASE):
        assert load_config("mine.yaml", words, cwd=own).config.data.bpe_vocab_size == 300


def test_options_compose_and_are_of_their_type(tmp_path: Path) -> None:
    for choice in OPTIONS:
        group, name = choice.split("=")
        config = load_config(None, [choice, *MANDATORY.get(choice, [])], cwd=tmp_path).config
        if group != "callbacks":
            assert getattr(config, group).type == ("decoder" if choice in SIZES else name)


def test_run_level_settings_are_those_of_the_schema() -> None:
    tree = yaml.safe_load((CONF / "train.yaml").read_text())
    groups = [next(iter(entry)) for entry in tree.pop("defaults") if isinstance(entry, dict)]
    assert tuple(groups) == schema.Config.GROUPS == options.GROUPS
    assert tree == dataclasses.asdict(schema.RunSettings())


def classes() -> list[tuple[str, type]]:
    hints = get_type_hints(schema.Config, include_extras=True)
    return [(group, cls) for group in options.BARE_GROUPS for cls in members(hints[group])]


@pytest.mark.parametrize(("group", "cls"), classes(), ids=lambda value: getattr(value, "__name__", value))
def test_option_file_holds_every_setting_at_its_default(group: str, cls: type) -> None:
    tree: dict[str, Any] = yaml.safe_load((CONF / group / f"{cls.type}.yaml").read_text())
    mandatory = {key for key, value in tree.items() if value == "???"}
    tree = {key: value for key, value in tree.items() if not str(value).startswith("${")}
    values: Any = {name: ["x"] if name == "files" else "x" for name in mandatory}
    defaults = {key: value for key, value in to_tree(cls(**values)).items() if key not in mandatory}
    if group == "data":  # null becomes the model's tokenizer, or bytes, when a config is loaded
        assert tree.pop("tokenizer") is None
        assert defaults.pop("tokenizer") == "bytes"
    follows = {"reference_lr"} & defaults.keys()  # the run's learning rate
    found = {key: value for key, value in tree.items() if key not in mandatory}
    assert found == {key: value for key, value in defaults.items() if key not in follows}


OWN = {"textgen": ("prompts", "max_new_tokens"), "divergence": ("threshold", "patience")}
"""What the default callbacks set otherwise: less text, and a detector that no healthy run, however noisy, sets off."""


@pytest.mark.parametrize("files", [["default"], ["minimal"], ["default", "full"]])
def test_callback_files_hold_every_setting_at_its_default(files: list[str], tmp_path: Path) -> None:
    found = [yaml.safe_load((CONF / "callbacks" / f"{name}.yaml").read_text()) for name in files]
    tree = {callback: given for each in found for callback, given in each.items() if callback != "defaults"}
    hints = get_type_hints(schema.CallbackSettings)
    for callback, given in tree.items():
        cls = next(kind for kind in hints[callback].__args__ if dataclasses.is_dataclass(kind))
        own = {key: given[key] for key in OWN.get(callback, ())}
        assert given == {**to_tree(cls()), **own}, callback
    assert to_tree(load_config(None, [f"callbacks={files[-1]}"], cwd=tmp_path).config)["callbacks"] == tree


def test_every_setting_has_a_comment_and_the_file_a_description() -> None:
    bare = {"type", "defaults", "metric_for_best_model", "skip_all_reduce_unused_params", "regex", "weight_decay",
            "post_local_gradient_allreduce", "enabled", "json"}  # fmt: skip
    for choice in [*OPTIONS, "train"]:
        file = CONF / f"{choice.replace('=', '/')}.yaml"
        assert options.description(file).endswith(".")
        for line in file.read_text().splitlines():
            key = re.match(r" *([a-z_0-9]+): *\S", line)
            assert not key or "#" in line or key.group(1) in bare, f"{file}: {line.strip()} has no comment"


def test_no_leaf_name_stands_for_two_settings() -> None:
    """Else a bare key would be ambiguous, or hide behind a run-level setting."""
    paths = defaultdict(set)
    for path, setting in settings().items():
        if setting.types:
            paths[setting.leaf].add(path)
    assert {leaf: found for leaf, found in paths.items() if len(found) > 1} == {}
    assert set(paths) & (root_keys() | set(options.GROUPS)) == set()


def test_listings_describe_everything(tmp_path: Path) -> None:
    listed = options.groups(cwd=tmp_path)
    found = [f"{group}={info.name}" for group, infos in listed.items() for info in infos]
    assert sorted(found) == sorted([*OPTIONS, f"{options.SERVER}=server"])
    assert all(info.description and info.file.is_file() for infos in listed.values() for info in infos)
    recipes = options.recipes(cwd=tmp_path)
    assert recipes[0].name == "default"
    assert {info.name for info in recipes} == {file.stem for file in RECIPES.glob("*.yaml")}
    assert all(info.description.endswith(".") for info in recipes)


def test_listings_hold_the_users_own(own: Path) -> None:
    write(own / "conf/experiment/x.yaml", "# @package _global_\n# Try x.\nseed: 1\n")
    listed = options.groups(cwd=own)
    assert [(i.name, i.description) for i in listed["experiment"]] == [("x", "Try x.")]
    assert "mine" in [info.name for info in listed["model"]]
    assert "own_rate" in [info.name for info in options.recipes(cwd=own)]
