"""Sweep syntax."""

from __future__ import annotations

from pathlib import Path

import pytest
from program import write

from forgather_cli.errors import ConfigError
from forgather_cli.sweeps.expand import expand, job_name


def test_product_of_all_values_in_the_order_typed() -> None:
    assert expand(["model=nano", "seed=1,2", "learning_rate=choice(1e-4,3e-4)"]) == [
        ["model=nano", "seed=1", "learning_rate=0.0001"], ["model=nano", "seed=1", "learning_rate=0.0003"],
        ["model=nano", "seed=2", "learning_rate=0.0001"], ["model=nano", "seed=2", "learning_rate=0.0003"],
    ]  # fmt: skip


def test_ranges_globs_and_quotes(tmp_path: Path) -> None:
    assert expand(["seed=range(1,6,2)"]) == [["seed=1"], ["seed=3"], ["seed=5"]]
    assert expand(["trainer=glob(*,exclude=[single,f*])"]) == [["trainer=ddp"], ["trainer=pipeline"]]
    write(tmp_path / "conf/model/wide.yaml", "type: decoder\n")
    assert ["model=wide"] in expand(["model=glob(*)"], cwd=tmp_path)
    assert expand(["tokenizer='a,b'", "betas=[0.1,0.2]"]) == [["tokenizer='a,b'", "betas=[0.1,0.2]"]]
    assert expand(["betas=[0.1,0.2],[0.3,0.4]"]) == [["betas=[0.1,0.2]"], ["betas=[0.3,0.4]"]]
    assert expand(["+callbacks.early_stopping.patience=1,2"])[1] == ["+callbacks.early_stopping.patience=2"]
    assert expand(["~callbacks.textgen"]) == [["~callbacks.textgen"]]
    assert [expand(job) for job in expand(["tokenizer=a/lr=1,b=2"])] == [
        [["tokenizer='a/lr=1'"]],
        [["tokenizer='b=2'"]],
    ]


def test_values_of_a_sweep_can_be_typed_again_and_texts_that_look_like_numbers_stay_as_typed() -> None:
    jobs = expand(["tokenizer='a b','c,d'"])
    assert [expand(job) for job in jobs] == [[job] for job in jobs]
    assert expand(["job_id=2023_09,1e5", "learning_rate=1e-3"]) == [
        ["job_id=2023_09", "learning_rate=1e-3"],
        ["job_id=1e5", "learning_rate=1e-3"],
    ]


def test_what_cannot_be_enumerated_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        expand(["seed=interval(0,1)", "model=glob(zzz*)", "a b=1", "seed=1,2"])
    interval, glob, broken = sorted(caught.value.problems, key=lambda p: ["seed", "mode", "a b="].index(p[:4]))
    assert "an interval has no list of values" in interval
    assert "matches no option; Options: decoder," in glob
    assert "not an override" in broken


def test_job_names_follow_the_content() -> None:
    name = job_name("text", ["seed=1", "model=nano"])
    assert name == job_name("text", ["seed=1", "model=nano"])
    assert name.startswith("seed=1_model=nano-")
    assert name != job_name("other text", ["seed=1", "model=nano"])
    assert name != job_name("text", ["seed=2", "model=nano"])
    assert job_name("text", ["seed=1,model=nano"]) != name
    weird = job_name("text", ["output_dir='/a b/../c'", "x=" + "y" * 500])
    assert not {"/", " "} & {*weird}
    assert len(weird) < 120
    assert job_name("text", [])
