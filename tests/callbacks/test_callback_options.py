"""The options under ``conf/callbacks``, and every callback added and removed by one override."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import tiny
import yaml
from program import modules_after
from refusals import case, cases, table

import forgather_cli.callbacks
from forgather_cli.callbacks import (
    DivergenceDetector,
    EarlyStopping,
    GradNormLogger,
    JsonLogger,
    ParameterNormLogger,
    ProgressCallback,
    TextgenCallback,
)
from forgather_cli.callbacks.base import CallbackList
from forgather_cli.callbacks.build import build_callbacks
from forgather_cli.callbacks.trackers import Trackers
from forgather_cli.checkpoint.load import Reader
from forgather_cli.config.explain import ExplainedGroup, explain
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import (
    CallbackPart,
    CallbackSettings,
    Config,
    DivergenceSettings,
    ProgressSettings,
    Target,
    TextgenSettings,
    TrackersSettings,
)
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import ConfigError
from forgather_cli.plan.run import make_plan
from forgather_cli.run_dir import RunDir

NAMES = [field.name for field in dataclasses.fields(CallbackSettings) if field.name != "custom"]
PARTS = {part.type: part for part in CallbackPart.members}
ORDER = [
    "metrics", "weight_norm", "peak_memory", "info", "progress", "json", "tensorboard", "grad_norms", "parameter_norms",
    "trackers", "textgen", "diloco", "control", "divergence", "early_stopping", "profiler",
]  # fmt: skip
"""Of the events among them."""
NEEDS_A_PACKAGE = {"trackers"}
OF_ROOMS = {"tasks"}
"""Which tests of their own add."""


def config(*overrides: str) -> Config:
    return load_config(None, list(overrides)).config


def active(callbacks: CallbackSettings) -> set[str]:
    return {name for name in NAMES if getattr(callbacks, name) is not None}


def test_the_options() -> None:
    full, default, minimal = (
        active(config(f"callbacks={option}").callbacks) for option in ("full", "default", "minimal")
    )
    assert minimal < default < full
    assert full == {*ORDER} - NEEDS_A_PACKAGE
    assert {"control", "divergence"} <= default


def test_every_callback_can_be_built_in_the_order_of_events(tmp_path: Path) -> None:
    assert {*NAMES} == {*PARTS}
    built = [name for name, _ in build_callbacks(config("callbacks=full").callbacks, RunDir(tmp_path), config_tree={})]
    assert built == [name for name in ORDER if name not in NEEDS_A_PACKAGE]
    assert list(tmp_path.iterdir()) == []
    for name, part in PARTS.items():  # as a script makes it
        callback = part().load_maker()()
        assert (callback.settings, callback.kind, callback.name) == (part(), part, name)
        fields = [field.name for field in dataclasses.fields(part)]
        assert "type" not in fields, f"callbacks.{name}: no tree has a type there; write type = {name!r}"


def test_each_is_added_with_its_defaults_and_removed_by_one_override(tmp_path: Path) -> None:
    names = [name for name in NAMES if name not in OF_ROOMS]
    settings = config("~callbacks", *(f"+callbacks.{name}={{}}" for name in names))
    added = settings.callbacks
    assert make_plan(settings).ranks
    assert {name: getattr(added, name) for name in names} == {name: PARTS[name]() for name in names}
    built = [name for name, _ in build_callbacks(added, RunDir(tmp_path))]
    assert [name for name in built if name in ORDER] == ORDER
    present = sorted({*ORDER} - NEEDS_A_PACKAGE)
    halves = [f"~callbacks.{name}" for name in present[::2]], [f"callbacks.{name}=null" for name in present[1::2]]
    for words, left in zip(halves, (present[1::2], present[::2]), strict=True):
        assert active(config("callbacks=full", *words).callbacks) == {*left}


def test_each_setting_is_explained() -> None:
    [group] = explain("callbacks")
    assert isinstance(group, ExplainedGroup)
    own = [f"callbacks.{name}.{each.name}" for name, part in PARTS.items() for each in dataclasses.fields(part)]
    assert [path for path in own if not group.settings[path]] == []


def test_importing_them_is_cheap() -> None:
    assert not {"torch", "pydantic", "forgather_cli.callbacks.base"} & modules_after("import forgather_cli.callbacks")
    loaded = modules_after("from forgather_cli.callbacks import DivergenceDetector, TrainerCallback")
    assert not {"torch", "hydra", "forgather_cli.callbacks.textgen"} & loaded
    makers = {part.maker.rpartition(":")[2] for part in PARTS.values()}
    assert makers <= {*forgather_cli.callbacks.__all__}
    for name in forgather_cli.callbacks.__all__:
        assert getattr(forgather_cli.callbacks, name).__name__ == name


def of_target(target: Target) -> None:
    build_callbacks(CallbackSettings(custom={"mine": target}), RunDir(Path("run")))


def prompts(content: str) -> None:
    Path("prompts.yaml").write_text(content)
    TextgenSettings(prompts="prompts.yaml").texts()


def script(*callbacks: Any) -> None:
    tiny.script(Path("run"), callbacks=[*callbacks])


PROMPTS, COLUMNS = r"^callbacks\.textgen\.prompts: .*", r"callbacks\.progress\.step_columns\."
test_what_is_refused = table(
    case(ConfigError, r"^DivergenceDetector\.smothing: unknown setting; did you mean smoothing\?",
         DivergenceDetector, smothing=0.3),
    case(ConfigError, r"^DivergenceDetector\.action: must be stop, abort or rollback, got 'halt'",
         DivergenceDetector, action="halt"),
    case(ConfigError, r"^DivergenceDetector: .*got 0\.3; write DivergenceDetector\(name=value\)",
         DivergenceDetector, 0.3),
    case(ConfigError, "threshold or relative_threshold", DivergenceDetector, DivergenceSettings(threshold=None)),
    # rules between settings hold for them too
    case(ConfigError, r"(?s)DivergenceDetector.action: rollback needs.*EarlyStopping[^\n]*eval_strategy",
         script, DivergenceDetector(action="rollback"), EarlyStopping(patience=2)),
    case(ConfigError, r"DivergenceDetector\.max_rollbacks: nothing reads it",
         script, DivergenceDetector(max_rollbacks=2)),
    *cases(ConfigError, of_target,
        (Target("no_such_module.Thing"), r"^callbacks\.mine\._target_: .*cannot import no_such_module.Thing"),
        (Target("test_callback_events.Missing"), r"^callbacks\.mine.*: .*module test_callback_events has no Missing"),
        (Target("Recorder"), r"^callbacks\.mine.*: .*it names no module; write package.module.Recorder"),
        (Target("test_callback_events.Recorder", {"speed": 1}),
         r"^callbacks\.mine\.speed: .*takes no such argument; Arguments: tag, seen"),
    ),
    *(case(ConfigError, r"^callbacks\.mine: is no callback, .* on_step_end", CallbackList().add, thing, "mine")
      for thing in (5, object(), dict)),
    *cases(ConfigError, lambda change: ProgressCallback(ProgressSettings(step_columns=change)),
        ({"loss": {"wdth": 3}}, COLUMNS + "loss.wdth: unknown, got 3; a column has label, width, fmt, suffix"),
        ({"loss": {"width": "8"}}, COLUMNS + "loss.width: must be a number of characters, got '8'"),
        ({"loss": {"fmt": ".4q"}}, COLUMNS + "loss.fmt: not a format, got '.4q'"),
        ({"lss": None}, COLUMNS + "lss: there is no such column to remove"),
    ),
    case(ConfigError, "output_stream", ProgressCallback, output_stream=Path("progress.txt")),
    case(ConfigError, "output_stream", ProgressCallback, output_stream="stdin"),
    *cases(ConfigError, prompts,
        ("- def f(x):\n", PROMPTS + "must be a list of texts"),  # a mapping to YAML
        ("a: 1", PROMPTS + "must be a list of texts, got {'a': 1}"),
        ("[]", PROMPTS + "is empty"),
        ("[", PROMPTS + "not valid YAML"),
    ),
    case(ConfigError, r"no/such\.yaml: cannot be read \(No such file", TextgenSettings(prompts="no/such.yaml").texts),
    case(ConfigError, r"^callbacks\.trackers\.names: cannot import test_trackers\.Missing",
         lambda: Trackers(TrackersSettings(names=["test_trackers.Missing"]), RunDir(Path("run")))),
)  # fmt: skip


def test_a_script_s_own_are_checked_recorded_and_stand_in_the_place_of_ours(tmp_path: Path) -> None:
    detector = DivergenceDetector(smoothing=1.0, action="abort", warmup=0)
    texts = TextgenCallback(prompts=["ab"], max_new_tokens=3)
    callbacks = [detector, texts, GradNormLogger(every=1), JsonLogger, ParameterNormLogger(log_spectral_norms=False)]
    trainer = tiny.script(
        tmp_path, tiny.decoder(vocab_size=300), evaluated=tiny.RandomTokens(), processing_class=ByteTokenizer(),
        callbacks=callbacks, max_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=1, save_strategy="steps",
    )  # fmt: skip
    trainer.train()
    names = [*trainer.callbacks.by_name]
    assert names.count("json") == 1
    assert {"json_2", "divergence_2"}.isdisjoint(names)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())["callbacks"]
    assert (saved["divergence"]["action"], saved["grad_norms"], "json" in saved) == ("abort", {"every": 1}, True)
    assert len([record for record in tiny.metrics(tmp_path) if "loss" in record]) == 2, "written once"
    for name in ("samples.txt", "gradient_norms.jsonl", "parameter_norms.jsonl"):
        assert (tmp_path / name).stat().st_size > 0
    state = Reader(trainer.run_dir.checkpoint(2)).state("callbacks")
    assert state["divergence"]["seen"] == 2
    assert trainer.pop_callback(DivergenceDetector) is detector
