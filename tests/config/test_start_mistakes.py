"""What those type who come from other trainers: what each message says to copy, and that it then works."""

from __future__ import annotations

from pathlib import Path

import pytest
from program import write

from forgather_cli.config.batch import batch_plan
from forgather_cli.config.load import load_config
from forgather_cli.errors import ConfigError

PARTS = ("per_device_train_batch_size=4", "gradient_accumulation_steps=2")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems(*words: str, recipe: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, words)
    return caught.value.problems


def test_the_parts_of_a_batch_beside_a_recipes_whole_name_the_setting_that_takes_it_away() -> None:
    [found] = problems(*PARTS, recipe="pretrain_60m")
    assert "set global_batch_size=null" in found
    config = load_config("pretrain_60m", [*PARTS, "global_batch_size=null"]).config
    assert batch_plan(config, 1).global_batch == 8
    assert batch_plan(config, 2).global_batch == 16


def test_a_recipe_of_ones_own_that_gives_both_parts_means_them(tmp_path: Path) -> None:
    both = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
    mine = write(tmp_path / "recipes/mine.yaml", f"defaults: [pretrain_60m, _self_]\n{both}")
    loaded = load_config(str(mine), [])
    assert (loaded.config.global_batch_size, loaded.tree["global_batch_size"]) == (None, None)
    assert batch_plan(loaded.config, 2).global_batch == 16
    assert "global_batch_size=64 of recipes/pretrain_60m.yaml is left out" in loaded.notes[0]
    assert load_config(str(mine), ["global_batch_size=8"]).config.global_batch_size == 8
    # said beside the parts, or after them, it holds
    whole = write(tmp_path / "whole.yaml", f"defaults: [pretrain_60m, _self_]\nglobal_batch_size: 8\n{both}")
    assert load_config(str(whole), []).config.global_batch_size == 8
    later = write(tmp_path / "later.yaml", "defaults: [mine, _self_]\nglobal_batch_size: 16\n")
    assert problems(recipe=str(later))[0].startswith("gradient_accumulation_steps: 2 disagrees with global_batch_size")
    one = write(tmp_path / "one.yaml", "defaults: [pretrain_60m, _self_]\nper_device_train_batch_size: 4\n")
    assert load_config(str(one), []).config.global_batch_size == 64


def test_an_option_that_does_not_exist_in_the_place_of_a_group_is_one_message(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.yaml", "defaults: [train, _self_]\noptimizer: adamw_torch\n")
    [found] = problems(recipe=str(mine))
    for part in ("optimizer=adamw_torch: no such option", "did you mean adamw?", "- override optimizer: ", str(mine)):
        assert part in found
    write(mine, "defaults: [train, override optimizer: adamw, _self_]\n")
    assert load_config(str(mine), []).config.optimizer.type == "adamw"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("model=here", "model=pretrained model.path=here"),
        ("model=Qwen/Qwen3-0.6B", "model=pretrained model.path=Qwen/Qwen3-0.6B"),
        ("data=a.jsonl", "data=instruct 'data.files=[a.jsonl]'"),
        ("data=a.jsonl", "data=text 'data.files=[a.jsonl]'"),
        ("adapter=here", "adapter=lora adapter.from_adapter=here"),
    ],
)
def test_a_path_in_the_place_of_an_option_names_what_reads_it(tmp_path: Path, typed: str, said: str) -> None:
    (tmp_path / "here").mkdir()
    write(tmp_path / "a.jsonl", "{}\n")
    group, recipe = typed.partition("=")[0], "lora_finetune" if typed.startswith("adapter") else "finetune"
    base = [] if group == "model" else ["model.path=here"]
    [found] = problems(*base, typed, recipe=recipe)  # and nothing of model.path, which that would set
    assert found.startswith(f"{typed}: no such option; ")
    assert said in found
    words = [word.strip("'") for word in said.split()]
    more = ["data.files=[a.jsonl]"] if recipe == "lora_finetune" else []
    load_config(recipe, [*base, *words, *more])


def test_files_to_evaluate_on_alone_name_all_that_their_option_needs() -> None:
    [found] = problems("data.eval_files=[b.txt]")
    assert "choose data=text data.files=[...] or leave" in found
    [found] = problems("data.files=[b.txt]")
    assert "choose data=text or leave" in found
    load_config(None, ["data=text", "data.files=[a.txt]", "data.eval_files=[b.txt]"])


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (r"[layers\.[23]\.]", [r"layers\.[23]\."]),
        (r"[layers\.(0|1)\.mlp]", [r"layers\.(0|1)\.mlp"]),
        (r"[(norm|bias)$, lm_head]", ["(norm|bias)$", "lm_head"]),
        (r"[^lm_head,a{1,2}]", ["^lm_head", "a{1,2}"]),
        (r"[.*\.mlp\..*]", [r".*\.mlp\..*"]),
        (r"['layers\.3\.', lm_head]", [r"layers\.3\.", "lm_head"]),
        ("[norm]", ["norm"]),
    ],
)
def test_regular_expressions_are_read_as_they_stand(typed: str, read: list[str]) -> None:
    assert load_config(None, [f"trainable={typed}"]).config.trainable == read


def test_what_is_no_list_of_texts_is_refused_as_before() -> None:
    for line in ("trainable=[(a", "learning_rate=(1", "model={a: [}"):
        assert ": not an override (" in problems(line)[0]
