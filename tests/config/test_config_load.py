"""Composition and decoding: what a recipe becomes, and that it survives the way through config.yaml."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml
from program import write

from forgather_cli import __version__
from forgather_cli.cli.evaluate import config_to_evaluate
from forgather_cli.config.decode import decode, dump_saved, dump_tree, load_saved, load_tree, to_tree
from forgather_cli.config.load import load_config, load_resumed, reload_config
from forgather_cli.config.schema import CosineSettings, LinearSettings, Target, TextSettings
from forgather_cli.errors import ConfigError


def test_default_recipe_is_decoded_into_typed_settings(tmp_path: Path) -> None:
    loaded = load_config(None, ["model=nano", "learning_rate=1e-4"], cwd=tmp_path)
    config = loaded.config
    assert config.model.hidden_size == 64
    assert config.learning_rate == 1e-4
    assert config.recipe == loaded.recipe == "default"
    assert loaded.recipe_path.name == "default.yaml"
    assert loaded.recipe_text == loaded.recipe_path.read_text()
    assert loaded.overrides == ("model=nano", "learning_rate=1e-4")
    assert {"model", "learning_rate", "max_steps", "lr_scheduler.warmup_steps"} <= loaded.given
    assert "data.seq_len" not in loaded.given


def test_output_dir_is_named_by_recipe_and_time_and_seen_by_interpolations(tmp_path: Path) -> None:
    config = load_config("pretrain_60m", ["logging_dir=${output_dir}/logs"], cwd=tmp_path).config
    assert config.output_dir.startswith("outputs/pretrain_60m/20")
    assert config.logging_dir == f"{config.output_dir}/logs"
    assert list(tmp_path.iterdir()) == []


def test_saved_config_is_read_back_equal(tmp_path: Path) -> None:
    overrides = [
        "optimizer=muon", "eval_strategy=no", "eval_on_start=true", "resume_from_checkpoint=true",
        "resume_components=[model,optimizer]", "betas=[0.8,0.99]", "rope_scaling={rope_type: yarn, factor: 4}",
        "max_grad_norm=null", "lr_scheduler.warmup_steps=0.05", "+callbacks.early_stopping.patience=2",
        "++callbacks.mine={_target_: forgather_cli.callbacks.base.TrainerCallback}",
        "+optimizer.groups.head={regex: lm_head, optimizer: {type: sgd, momentum: 0.5}}",
    ]  # fmt: skip
    loaded = load_config(None, overrides, cwd=tmp_path)
    assert load_saved(write(tmp_path / "config.yaml", dump_tree(loaded.tree))) == loaded.config
    assert decode(to_tree(loaded.config)) == loaded.config
    assert loaded.config.callbacks.custom == {"mine": Target(path="forgather_cli.callbacks.base.TrainerCallback")}


TEXTS = (
    "", "word", "a: b # c", "1e5", "2023_09", "yes", "it's", '"quoted"', r"(^|\.)lm_head\.weight$", "\\\\n",
    "two\nlines", "trailing \n\n", "a\tb\r", "größer", "数 😀", "\u2028\x85\x1b", "ends with a blank ", "long " * 60,
    "/a/path" * 40, f"{'lines of some words, ' * 9}\n\n  and more: " * 3, "\\" * 3 + "\n",
)  # fmt: skip


def test_libyaml_writes_what_it_writes_alike_and_without_it_all_is_written_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_implicit_resolver("float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789"))
    numbers = [1e-8, 1e5, 1e22, 3.0, -0.1, math.inf, math.nan, 10**12, True, None]
    plain = [load_config(recipe, []).tree for recipe in ("default", "pretrain_160m")]
    trees = [*plain, {"numbers": numbers, "same": [numbers], "empty": [{}, []]}]
    trees += [{key: [text, {"a": {"b b": text}}], text[:60] or "c": None} for key in ("k", "größe") for text in TEXTS]
    expected = [yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120) for tree in trees]
    assert [dump_tree(tree) for tree in trees] == expected
    if yaml.__with_libyaml__:
        with monkeypatch.context() as patch:
            patch.delattr(yaml.emitter.Emitter, "emit")  # PyYAML's own, which takes five times as long
            assert [dump_tree(tree) for tree in plain] == expected[:2]
    monkeypatch.delattr(yaml, "CSafeDumper", raising=False)
    assert [dump_tree(tree) for tree in trees] == expected


def test_what_resume_and_eval_do_themselves_makes_their_settings_count(tmp_path: Path) -> None:
    write(tmp_path / "config.yaml", dump_tree(load_config(None, ["eval_strategy=no"], cwd=tmp_path).tree))
    parts = "resume_components=[model]"
    resumed = reload_config(tmp_path, [parts, "ignore_data_skip=true"]).config
    assert (resumed.resume_from_checkpoint, resumed.resume_components) == (True, ["model"])
    with pytest.raises(ConfigError, match="resume_components: nothing reads it with resume_from_checkpoint=false"):
        reload_config(tmp_path, [parts, "resume_from_checkpoint=false"])
    assert config_to_evaluate(tmp_path, ["max_eval_samples=2"])[0].config.max_eval_samples == 2


def test_yaml_readings_that_surprise(tmp_path: Path) -> None:
    """A bare ``no`` is false in YAML 1.1 and ``1e-3`` is text for many readers; sizes look like numbers."""
    write(
        tmp_path / "r.yaml",
        "defaults:\n  - train\n  - override model: 160m\n  - _self_\n"
        "eval_strategy: no\nsave_strategy: 'no'\nlearning_rate: 1e-3\nnum_train_epochs: 2\n",
    )
    config = load_config(str(tmp_path / "r.yaml"), [], cwd=tmp_path).config
    assert (config.eval_strategy, config.save_strategy) == ("no", "no")
    assert config.learning_rate == 0.001
    assert config.num_train_epochs == 2.0
    assert config.model.hidden_size == 768


def test_a_recipe_outranks_the_one_it_starts_from_and_option_files(tmp_path: Path) -> None:
    write(
        tmp_path / "recipes/base.yaml",
        "defaults: [train, {override trainer: pipeline}, _self_]\nn_microbatches: 8\nseq_len: 64\nseed: 1\n",
    )
    write(tmp_path / "recipes/outer.yaml", "defaults: [base, _self_]\nn_microbatches: 2\nseed: 2\n")
    loaded = load_config("outer", ["data.seq_len=32"], cwd=tmp_path)
    assert loaded.config.trainer.n_microbatches == 2
    assert loaded.tree["data"]["seq_len"] == 32
    assert loaded.config.seed == 2
    # a recipe outranks option files wherever _self_ stands
    write(tmp_path / "mine.yaml", "defaults: [_self_, train]\nmodel: {hidden_size: 128}\nmax_steps: 7\n")
    write(tmp_path / "seed/x.yaml", "a: 1\n")  # a directory beside it that is no group
    config = load_config("./mine.yaml", ["seed=3"], cwd=tmp_path).config
    assert (config.model.hidden_size, config.max_steps, config.seed) == (128, 7, 3)


def test_users_options_and_recipes_add_to_the_shipped_ones(tmp_path: Path) -> None:
    write(tmp_path / "conf/model/wide.yaml", "# Wide.\ndefaults: [nano, _self_]\nhidden_size: 96\n")
    write(tmp_path / "own dir, 'x'/lr_scheduler/mine.yaml", "type: linear\nmin_lr_ratio: 0.5\n")
    write(tmp_path / "own dir, 'x'/here.yaml", "defaults: [train, {override model: wide}, _self_]\n")
    write(tmp_path / "conf/experiment/long.yaml", "# @package _global_\nmax_steps: 123\n")
    words = ["lr_scheduler=mine", "warmup_steps=5", "+experiment=long"]
    config = load_config("here", words, config_dir=tmp_path / "own dir, 'x'", cwd=tmp_path).config
    assert config.max_steps == 123
    assert config.model.hidden_size == 96
    assert config.lr_scheduler == LinearSettings(min_lr_ratio=0.5, warmup_steps=5)


def test_target_options_take_keywords_that_fit_their_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "own_model_k1.py", "class Net:\n    def __init__(self, vocab_size, width=3, depth=2): ...\n")
    write(tmp_path / "conf/model/own.yaml", "_target_: own_model_k1.Net\nwidth: 5\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["model=own", "width=7", "model.depth=1"]).config
    assert config.model == Target(path="own_model_k1.Net", kwargs={"width": 7, "depth": 1})


def test_loading_leaves_no_trace_in_hydra(tmp_path: Path) -> None:
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    before = set(ConfigStore.instance().repo)
    for _ in range(2):
        load_config(None, [], cwd=tmp_path)
    assert not GlobalHydra.instance().is_initialized()
    assert set(ConfigStore.instance().repo) == before


def test_what_is_composed_again_is_what_the_files_say_now(tmp_path: Path) -> None:
    sizes = []
    for size, more in ((64, ["num_hidden_layers=3"]), (96, []), (96, [])):
        write(tmp_path / "conf/model/mine.yaml", f"type: decoder\nhidden_size: {size}\n")
        model = load_config(None, ["model=mine", *more], cwd=tmp_path).tree["model"]
        sizes.append((model["hidden_size"], model["num_hidden_layers"]))
    assert sizes == [(64, 3), (96, 4), (96, 4)]


def test_relative_paths_count_from_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, run = tmp_path / "start", tmp_path / "run"
    for folder in (start / "train", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    write(start / "texts/a.txt", "some text")
    write(run / "origin.yaml", f"directory: {start}\n")
    own = {
        "_target_": "own.Data", "folder": "./texts", "files": ["texts/a.txt", "texts/none.txt"], "split": "train",
        "more": {"file": "texts/a.txt", "rows": 3}, "key": "${oc.env:HOME}", "long": "a/" * 5000,
    }  # fmt: skip
    trees = [{"data": own}, {"data": {"files": ["a.txt", "~/b"], "tokenizer": "texts"}, "loss": {"type": "train"}}]
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = [load_tree(write(run / "config.yaml", dump_tree(tree))) for tree in trees]
    there = {"folder": f"{start}/texts", "files": [f"{start}/texts/a.txt", "texts/none.txt"]}
    assert found[0] == {"data": {**own, **there, "more": {"file": f"{start}/texts/a.txt", "rows": 3}}}
    assert found[1]["data"] == {"files": [f"{start}/a.txt", "~/b"], "tokenizer": f"{start}/texts"}
    assert found[1]["loss"] == {"type": "train"}
    monkeypatch.chdir(start)
    assert load_tree(run / "config.yaml") == trees[1], "there they are as typed"


def test_a_resume_changes_values_replaces_groups_whole_asks_for_what_they_require_and_names_a_damaged_config(
    tmp_path: Path,
) -> None:
    loaded = load_config(None, ["model=nano", "warmup_steps=7", "callbacks=minimal"], cwd=tmp_path)
    saved = write(tmp_path / "run/config.yaml", dump_tree(loaded.tree))
    resumed = load_resumed(saved, [])
    assert resumed.config == load_saved(saved)
    assert (resumed.recipe, resumed.given) == ("default", frozenset())
    words = ["max_steps=9", "trainer=pipeline", "n_microbatches=8", "lr_scheduler=cosine"]
    config = load_resumed(saved, words).config
    assert (config.max_steps, config.trainer.n_microbatches, config.model.hidden_size) == (9, 8, 64)
    assert (config.lr_scheduler, config.callbacks.tensorboard) == (CosineSettings(), None)
    with pytest.raises(ConfigError, match=r"data.files: required by data=text; set data.files=\[\.\.\.\]"):
        load_resumed(saved, ["data=text"])
    text = load_resumed(saved, ["data=text", "files=[a.txt]"]).config.data
    assert text == TextSettings(files=["a.txt"], tokenizer="bpe")
    saved.write_text(saved.read_text().replace("hidden_size: 64", "hidden_size: wide"))
    with pytest.raises(ConfigError, match=r"config.yaml: model.hidden_size: must be a whole number, got 'wide'"):
        load_saved(saved)


def test_own_groups_come_before_the_shipped_one_and_a_saved_order_stays(tmp_path: Path) -> None:
    recipe = "defaults: [train, _self_]\noptimizer:\n  groups:\n    head: {regex: head}\n"
    write(tmp_path / "recipes" / "mine.yaml", recipe)
    more = ["+optimizer.groups.embed={regex: embed}", "optimizer.groups.no_decay.settings.weight_decay=0.01"]
    loaded = load_config("mine", more, cwd=tmp_path)
    assert list(loaded.config.optimizer.groups) == ["head", "embed", "no_decay"]
    optimizer = loaded.tree["optimizer"]
    groups = {name: optimizer["groups"][name] for name in ("no_decay", "head", "embed")}
    tree = {**loaded.tree, "optimizer": {**optimizer, "groups": groups}}
    saved = write(tmp_path / "config.yaml", dump_tree(tree))  # as runs of 0.1.0 have it
    assert list(load_resumed(saved, []).config.optimizer.groups) == ["no_decay", "head", "embed"]
    resumed = load_resumed(saved, ["+optimizer.groups.norms={regex: norm}"]).config
    assert list(resumed.optimizer.groups) == ["norms", "no_decay", "head", "embed"]


def test_a_saved_config_says_which_version_wrote_it_and_one_without_is_completed_as_0_2_trained(tmp_path: Path) -> None:
    tree = dict(load_config(None, ["tokenizer=bytes"]).tree)
    tree["data"] = {key: value for key, value in tree["data"].items() if key != "add_bos"}
    saved = write(tmp_path / "config.yaml", dump_saved(tree))
    assert f"forgather_version: {__version__}\n" in saved.read_text()
    assert load_saved(saved).data.add_bos is None
    assert load_saved(write(tmp_path / "older.yaml", dump_tree(tree))).data.add_bos is False


def test_what_a_recipe_sets_of_its_option_goes_with_it_and_is_said(tmp_path: Path) -> None:
    write(tmp_path / "conf/lr_scheduler/mine.yaml", "_target_: torch.optim.lr_scheduler.StepLR\nstep_size: 5\n")
    own = load_config(None, ["lr_scheduler=mine"], cwd=tmp_path)
    assert own.config.lr_scheduler.kwargs == {"step_size": 5}
    [note] = [note for note in own.notes if "left out" in note]
    assert all(text in note for text in ("lr_scheduler.warmup_steps", "lr_scheduler=linear", "lr_scheduler=mine"))
    kept = load_config(None, ["lr_scheduler=cosine"], cwd=tmp_path)  # which has it too
    assert kept.config.lr_scheduler.warmup_steps == 20
    assert not kept.notes
    for body in ("trainer:\n  n_microbatches: 8\n", "n_microbatches: 8\n"):
        recipe = f"defaults: [train, {{override trainer: pipeline}}, _self_]\nnproc_per_node: 2\n{body}"
        write(tmp_path / "recipes/piped.yaml", recipe)
        piped = load_config("piped", ["trainer=ddp"], cwd=tmp_path)
        assert any("trainer.n_microbatches" in note and "trainer=pipeline" in note for note in piped.notes)
        assert load_config("piped", [], cwd=tmp_path).config.trainer.n_microbatches == 8
    with pytest.raises(ConfigError, match="n_microbatches"):  # what was typed now is meant
        load_config("piped", ["trainer=ddp", "n_microbatches=8"], cwd=tmp_path)
    write(tmp_path / "recipes/wrong.yaml", "defaults: [train, _self_]\nn_microbatches: 8\n")
    with pytest.raises(ConfigError, match="n_microbatches"):  # never of an option that it chose
        load_config("wrong", ["trainer=ddp"], cwd=tmp_path)
