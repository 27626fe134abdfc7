"""Files of a run that somebody changed and signed anew: the hashes say that all is well, so each value is looked at."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program import Process, forgather, printed
from safetensors.torch import load_file, save_file
from saving import resign

SMALL = ["model=nano", "seq_len=16", "callbacks=minimal", "global_batch_size=4", "logging_steps=1", "device=cpu",
         "data=synthetic", "num_samples=64", "num_eval_samples=4", "save_steps=1"]  # fmt: skip
STEP_1, STEP_2 = Path("RUN/checkpoints/step-00000001"), Path("RUN/checkpoints/step-00000002")
WEIGHT = "model.embed_tokens.weight"
Said = Callable[..., str]
WRITE = ["--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    assert forgather("train", *SMALL, "max_steps=2", f"output_dir={root}/RUN") == 0
    return root


@pytest.fixture(autouse=True)
def _here(made: Path, own_directory: None) -> None:
    """The working directory with a run RUN, which has checkpoints of its steps 1 and 2."""
    shutil.copytree(made, Path.cwd(), dirs_exist_ok=True)


def void(
    checkpoint: Path,
    value: float = float("nan"),
    file: str = "model/model.safetensors",
    name: str = WEIGHT,
    place: int = 7,
) -> None:
    """Put ``value`` into one place of a tensor."""
    tensors = load_file(checkpoint / file)
    tensors[name].view(-1)[place] = value
    save_file(tensors, checkpoint / file, {"format": "pt"})
    resign(checkpoint)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def said(*words: str, code: int = 2) -> str:
        done = printed(capsys, *words)
        assert done.code == code, done
        assert "Traceback" not in done.err
        return (done.out + done.err).replace(f"{Path.cwd()}/", "")

    return said


READERS = {
    "eval": ["eval", str(STEP_2)],
    "generate": ["generate", str(STEP_2), *WRITE],
    "finalize": ["finalize", str(STEP_2), "new"],
    "edit": ["checkpoint", "edit", str(STEP_2), "learning_rate=1e-4"],
    "train": ["train", *SMALL, "max_steps=3", "output_dir=new", f"resume_from_checkpoint={STEP_2}"],
}


@pytest.mark.parametrize("name", READERS)
def test_a_checkpoint_with_void_weights_is_refused_and_another_one_named(name: str, said: Said) -> None:
    void(STEP_2)
    text = said(*READERS[name])
    assert text.count("error: ") == 1
    assert f"{STEP_2}: is damaged: model/model.safetensors" in text
    assert WEIGHT in text
    assert f"use {STEP_1}, " in text
    assert not Path("new").exists()


MOMENT = f"{WEIGHT}.exp_avg"


@pytest.mark.parametrize(
    ("value", "file", "name"),
    [
        (float("nan"), "model/model.safetensors", WEIGHT),
        (float("inf"), "optimizer/optimizer.safetensors", MOMENT),
        (float("-inf"), "model/model.safetensors", WEIGHT),
    ],
)
def test_a_run_goes_on_from_the_checkpoint_before(value: float, file: str, name: str, said: Said) -> None:
    void(STEP_2, value, file, name)
    found = f"{file} holds values that are not finite, in {name}"
    assert found in said("checkpoint", "verify", "RUN", code=1)
    assert f"{STEP_1} is used" in said("resume", "RUN", "max_steps=3", code=0)


@pytest.mark.parametrize("case", ["float64", "float16", "int32", "below 0", "at -0"])
def test_moments_that_no_optimizer_has_made_are_damage(case: str, said: Said) -> None:
    """Of another dtype a step fails; below 0 the root of a second one is no number."""
    file = STEP_2 / "optimizer/optimizer.safetensors"
    tensors = load_file(file)
    if case in ("below 0", "at -0"):
        tensors[f"{MOMENT}_sq"].view(-1)[7] = {"below 0": -1e-12, "at -0": -0.0}[case]
        told = f"{MOMENT}_sq holds numbers below 0"
    else:
        tensors[MOMENT] = tensors[MOMENT].to(getattr(torch, case))
        told = f"{MOMENT} is {case}, its parameter float32"
    save_file(tensors, file, {"format": "pt"})
    resign(STEP_2)
    if case == "at -0":
        said("resume", "RUN", "max_steps=3", code=0)
        return
    text = said("resume", "RUN", "max_steps=3")
    assert text.count("error: ") == 1
    assert f"{STEP_2}: is damaged: {told}" in text
    assert f"use {STEP_1}, the newest other one" in text


@pytest.mark.parametrize("step", [0.0, 1.0, 3.0])
def test_a_parameter_at_another_step_is_damage(step: float, said: Said) -> None:
    """Its moments would be corrected by another factor."""
    void(STEP_2, step, "optimizer/optimizer.safetensors", f"{WEIGHT}.step", place=0)
    text = said("resume", "RUN", "max_steps=3")
    assert WEIGHT in text
    assert f"use {STEP_1}, " in text


def test_there_is_none_that_would_work(said: Said) -> None:
    void(STEP_1)
    void(STEP_2)
    assert "no usable checkpoint is left in RUN;" in said("resume", "RUN", "max_steps=3")
    assert "no other checkpoint that is healthy and whole" in said(*READERS["train"])


def test_an_average_leaves_them_out(said: Said, caplog: pytest.LogCaptureFixture) -> None:
    void(STEP_2)
    problem = f"{STEP_2}: is damaged: model/model.safetensors holds values that are not finite, in {WEIGHT}; "
    average = ("checkpoint", "average", "-o", "MEAN")
    said(*average, "--last", "2", "RUN")
    assert f"{problem}it is left out" in caplog.text
    assert f"{problem}leave it out" in said(*average, str(STEP_1), str(STEP_2))
    text = said(*average, str(STEP_1), str(STEP_2 / "model"))
    assert f"{STEP_2}/model: {WEIGHT} holds values that are not finite" in text
    assert not Path("MEAN").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "MODEL", "data=synthetic", "seq_len=16", "num_eval_samples=4", "device=cpu"],
        ["generate", "MODEL", *WRITE],
        ["finalize", "MODEL", "new"],
        ["train", *SMALL[1:], "model=pretrained", "model.path=MODEL", "max_steps=1"],
    ],
    ids=lambda words: words[0],
)
def test_a_model_directory_with_void_weights(words: list[str], said: Said) -> None:
    void(STEP_2)
    shutil.move(STEP_2 / "model", "MODEL")
    assert f"MODEL: {WEIGHT} holds values that are not finite" in said(*words)


@pytest.mark.parametrize(
    ("level", "file", "name"),
    [("size", "model/model.safetensors", WEIGHT), ("none", "optimizer/optimizer.safetensors", MOMENT)],
)
def test_what_was_not_verified_is_found_where_it_is_loaded(level: str, file: str, name: str, said: Said) -> None:
    void(STEP_2, float("inf"), file, name)
    text = said("resume", "RUN", "max_steps=3", f"verify_checkpoint={level}")
    assert f"{STEP_2}: is damaged: {name} holds values that are not finite" in text
    assert f"{STEP_1}, the newest other one" in text


MISSING = ...
DEEP = json.loads("[" * 150 + "]" * 150)
NAN = {"$": "float", "value": "nan"}
SMALL_GROUP = ("optimizer", "groups", "embedding.adamw")

WRONG: list[tuple[tuple[str | int, ...], Any]] = [
    (("trainer",), []), (("trainer", "global_step"), 1), (("trainer", "global_step"), -1),
    (("trainer", "global_step"), True), (("trainer", "global_step"), 10**400), (("trainer", "best_metric"), "x"),
    (("trainer", "epoch"), NAN), (("trainer", "metrics"), DEEP), (("trainer", "metrics", "loss_sum"), 0.5),
    (("trainer", "metrics", "counts"), [1, 2]), (("trainer", "metrics", "counts", 1), -1),
    (("trainer", "metrics", "totals", 2), 10**400), (("trainer", "metrics", "totals"), MISSING),
    (("trainer", "metrics", "skipped", 0), "x"),
    (("scheduler", "step"), 0), (("scheduler", "step"), 3), (("data", "sample"), 4),
    (("trainer", "counters"), []), (("trainer", "counters", "data", "sample"), "x"),
    (("scheduler", "step"), "x"), (("scheduler", "step"), -3), (("scheduler",), {}),
    (("data",), [1]), (("data", "sample"), -4), (("data", "sample"), 10**400), (("data", "epoch"), -1),
    (("data", "epoch"), MISSING), (("data", "ranges"), [[0, -1]]), (("data", "stream"), "x"),
    (("data", "stream"), {"items": -1}), (("data", "skipped_steps"), "x"), (("callbacks",), []),
    (("optimizer",), []), (("optimizer", "groups"), []), ((*SMALL_GROUP, "lr"), "x"), ((*SMALL_GROUP, "lr"), -1),
    ((*SMALL_GROUP, "lr"), NAN), ((*SMALL_GROUP, "parameters"), [1]), ((*SMALL_GROUP, "settings", "initial_lr"), "x"),
    ((*SMALL_GROUP, "changed"), {"betas": "x"}), ((*SMALL_GROUP, "changed"), {"params": []}),
    (("optimizer", "tensors"), {}), (("optimizer", "tensors", WEIGHT), [DEEP]),
    (("optimizer", "values"), {"a": {"step": "x"}}), (("optimizer", "steps", WEIGHT), 1),
    (("optimizer", "steps", WEIGHT), "x"), (("optimizer", "steps"), [2]),
    (("identity",), "x"), (("identity", "config"), []), (("identity", "data", "fingerprint"), 5),
    (("trainer", "best_metric"), {"$": "nothing"}), (("trainer", "best_metric"), {"$": []}),
    (("trainer", "best_metric"), {"$": "int", "hex": 5}), (("trainer", "best_metric"), {"$": "tensor", "tensor": "x"}),
    (("trainer", "best_metric"), {"$": "numpy", "dtype": "<f4", "hex": ""}),
    (("rng",), 5), (("rng", "numpy", "items", 2), 10**6), (("rng", "python"), "x"),
]  # fmt: skip


def put(file: Path, path: tuple[str | int, ...], value: Any) -> None:
    document = json.loads(file.read_text())
    place = document if file.name == "manifest.json" else document["components"]
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda part: f"{part!r:.60}")
def test_a_wrong_field_of_a_state_is_damage(path: tuple[str | int, ...], value: Any, said: Said) -> None:
    file = STEP_2 / ("state-rank-00000.json" if path[0] == "rng" else "state.json")
    put(file, path, value)
    resign(STEP_2)
    text = said("resume", "RUN", "max_steps=3")
    assert text.count("error: ") == 1
    assert str(file) in text or path[-1] == "changed"  # of which the optimizer tells
    assert all(str(key) in text for key in path if isinstance(key, str)) or "its encoding" in text or path[0] in text
    assert not Path("RUN/checkpoints/step-00000003").exists()


@pytest.mark.parametrize("content", ["[]", '{"components": [1]}', "{}", '"x'])
@pytest.mark.parametrize("file", ["state.json", "state-rank-00000.json"])
def test_a_state_that_is_no_object_is_damage_like_other(file: str, content: str, said: Said) -> None:
    (STEP_2 / file).write_text(content)
    resign(STEP_2)
    assert re.search(rf"{STEP_2}/{file}: .*; use {STEP_1}, ", said(*READERS["train"]))


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -2), ("step", 10**400), ("metrics", {"loss": 10**400}), ("metrics", {"loss": "x"}),
     ("best_by", {"metric": "loss"}), ("holders", []), ("buffers", [1]), ("components", [])], ids=str,
)  # fmt: skip
def test_a_wrong_field_of_a_manifest_is_damage(field: str, value: Any, said: Said) -> None:
    put(STEP_2 / "manifest.json", (field,), value)
    resign(STEP_2)
    text = said("resume", "RUN", "max_steps=3", code=0)
    assert re.search(rf"{STEP_2}/manifest\.json: is damaged .*{field}.*; .*{STEP_1} is used", text)


@pytest.mark.parametrize(
    "change", [{"number": "x"}, {"data": []}, {"to_step": -1}, {"skipped_sample_ids": [-1]}], ids=str
)
def test_a_wrong_field_of_a_rollback_is_damage(
    change: dict[str, Any], said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    record = {"number": 1, "time": "", "reason": "", "from_step": 2, "to_step": 2, "num_skipped_samples": 0,
              "skipped_sample_ids": [], "data": [{"epoch": 0, "sample": 8}], "tensors": []}  # fmt: skip
    Path("RUN/rollbacks.jsonl").write_text(json.dumps({**record, **change}) + "\n")
    text = said("checkpoint", "list", "RUN")
    assert "RUN/rollbacks.jsonl:1: is damaged" in text
    assert next(iter(change)) in text
    assert "forgather resume RUN sets it aside" in text
    said("resume", "RUN", "max_steps=3", code=0)
    assert "so samples may be seen again; it is set aside as rollbacks.jsonl.bak" in caplog.text


DAMAGES: list[tuple[Callable[[], None], str]] = [
    # of the last rows, which rank 1 alone reads; of a state of its own; and of everybody's
    (lambda: void(STEP_2, name="lm_head.weight", place=-1), f"{STEP_2}: is damaged: lm_head.weight"),
    (lambda: put(STEP_2 / "state-rank-00001.json", ("rng", "python"), "x"), f"{STEP_2}/state-rank-00001.json: the"),
    (lambda: put(STEP_2 / "state.json", ("data", "sample"), -4), f"{STEP_2}/state.json: is damaged"),
]


def test_one_rank_of_two_tells_and_none_waits() -> None:
    words = [*SMALL, "trainer=fsdp2", "nproc_per_node=2", "output_dir=WHOLE"]
    with Process("train", *words, "max_steps=2") as job:
        assert job.finish() == 0, job.output
    for make, told in DAMAGES:
        shutil.rmtree("RUN")
        shutil.copytree("WHOLE", "RUN")
        make()
        with Process("resume", "RUN", "max_steps=3", "verify_checkpoint=none") as job:
            assert job.finish() == 2, job.output
        text = job.output.replace(f"{Path.cwd()}/", "")
        assert "Traceback" not in text
        assert text.count("error: ") == 1, text
        assert told in text


def test_a_manifest_of_another_step_than_its_state_is_damage(said: Said) -> None:
    put(STEP_2 / "manifest.json", ("step",), 20)
    resign(STEP_2)
    text = said("resume", "RUN", "max_steps=24")
    assert "is damaged" in text
    assert f"use {STEP_1}, the newest other one that is healthy and whole" in text
