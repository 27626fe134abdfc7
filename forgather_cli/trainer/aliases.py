"""Further names of settings in ``TrainingArguments``: each is read as what it stands for, and excludes it.

``ALIASES`` is the one table; ``docs/python_api.md`` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from forgather_cli.config.schema import FP8Settings, QATSettings, either
from forgather_cli.errors import ConfigError


class Alias(NamedTuple):
    """A name of ``TrainingArguments``; at its ``default`` it says nothing."""

    type: Any
    default: Any
    stands_for: str
    excludes: tuple[str, ...] = ()
    """Names that say the same: giving one of them too is a mistake, whatever its value."""
    read: Callable[[Any], dict[str, Any]] | None = None
    """Its value in other names; None: it is a setting itself."""
    needs: str = ""
    """The name without which nothing reads it."""


_PRECISION = ("precision", "bf16", "fp16", "fp8_recipe", "qat_recipe")
_DDP = ("trainer", "fsdp", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_find_unused_parameters",
        "ddp_static_graph")  # fmt: skip
_OF_SCHEDULE = "nothing; under trainer=pipeline it must be what the schedule has"
_FP8, _QAT = get_type_hints(FP8Settings)["fp8_recipe"], get_type_hints(QATSettings)["qat_recipe"]

ALIASES: dict[str, Alias] = {
    "mixed_precision": Alias(
        Literal["no", "bf16", "fp16"] | None, None, "precision: fp32, bf16, fp16", _PRECISION,
        lambda value: {"precision": "fp32" if value == "no" else value},
    ),
    "default_dtype": Alias(
        str | None, None,
        "the dtype in which parameters are constructed, torch's or its name: float32, or bfloat16 as "
        "precision=bf16_true",
    ),
    "float32_matmul_precision": Alias(
        Literal["highest", "high", "medium"] | None, None, "the setting; excludes tf32", ("tf32",)
    ),
    "detect_anomaly": Alias(bool, False, "the setting"),
    "debug_optimizer_groups": Alias(
        bool, False, "prints each parameter with its group and optimizer, as `forgather plan --params`"
    ),
    "torch_compile_full_graph": Alias(
        bool | None, None, "torch_compile_fullgraph", ("torch_compile_fullgraph",),
        lambda value: {"torch_compile_fullgraph": value},
    ),
    "fp8_recipe": Alias(
        _FP8 | None, None, "precision=fp8 with this fp8_recipe", _PRECISION,
        lambda value: {"precision": {"type": "fp8", "fp8_recipe": value}},
    ),
    "fp8_dim_alignment": Alias(int, 16, "the setting of precision=fp8", ("precision",),
        lambda value: {"precision": {"fp8_dim_alignment": value}}, "fp8_recipe"),
    "qat_recipe": Alias(
        _QAT | None, None, "precision=qat with this qat_recipe", _PRECISION,
        lambda value: {"precision": {"type": "qat", "qat_recipe": value}},
    ),
    "preserve_best_model": Alias(
        bool | None, None, "preserve_n_best: 1, or 0 if False", ("preserve_n_best",),
        lambda value: {"preserve_n_best": int(value)},
    ),
    "best_model_metric": Alias(
        str | None, None, "metric_for_best_model", ("metric_for_best_model",),
        lambda value: {"metric_for_best_model": value},
    ),
    "ddp": Alias(dict | None, None, "trainer=ddp with these settings", _DDP,
        lambda value: {"trainer": {"type": "ddp", **value}}),
    "post_local_sgd": Alias(dict | None, None, "trainer=ddp with this post_local_sgd", _DDP,
        lambda value: {"trainer": {"type": "ddp", "post_local_sgd": value}}),
    "pp_stage_type": Alias(Literal["loop", "v"] | None, None, _OF_SCHEDULE, (), lambda value: {}),
    "is_multistage": Alias(bool | None, None, _OF_SCHEDULE, (), lambda value: {}),
}  # fmt: skip


def without_aliases(given: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments with each alias as what it stands for.

    ``named``: those that the script has named. Raises ConfigError, with all of them, for values that an alias does not
    take and for what says the same.
    """
    values = {name: value for name, value in given.items() if name not in ALIASES or ALIASES[name].read is None}
    dtype = values.pop("default_dtype", None)
    problems: list[str] = []
    for name, alias in ALIASES.items():
        value = given.get(name)
        value = getattr(value, "value", value)  # enums too
        if value is None or value == alias.default:
            continue
        both = [other for other in alias.excludes if other != name and other in named]
        problems += [f"{name}: {other} says it too, got both; leave one of the two out" for other in both]
        if alias.read is None or both:
            continue
        if (wrong := _wrong(alias.type, value)) is not None:
            problems.append(f"{name}: {wrong}")
        elif alias.needs and given.get(alias.needs) is None:
            problems.append(f"{name}: nothing reads it without {alias.needs}, got {value!r}; set that, or leave it out")
        else:
            for key, said in alias.read(value).items():  # two may say something of one group
                values[key] = {**(values.get(key) or {}), **said} if isinstance(said, dict) else said
    if dtype is not None:
        try:
            values |= _constructed_in(dtype, {**given, **values}, named)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return values


def _wrong(hint: Any, value: Any) -> str | None:
    """What is wrong with an alias's value; None if nothing is."""
    kinds = get_args(hint) or (hint,)
    words = [word for kind in kinds for word in get_args(kind)]
    if words:
        return None if value in words else f"must be {either(words)}, got {value!r}; give one of them"
    if isinstance(value, kinds):
        return None
    word = {bool: "True or False", int: "a whole number", dict: "a dict"}.get(kinds[0], "text")
    return f"must be {word}, got {value!r}; give that"


def _constructed_in(dtype: Any, given: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """What ``default_dtype`` says of ``precision``. Raises ConfigError."""
    text = str(dtype).removeprefix("torch.")
    kind = {"float32": "fp32", "fp32": "fp32", "float": "fp32", "bfloat16": "bf16_true", "bf16": "bf16_true"}.get(text)
    if kind is None:
        raise ConfigError(
            f"default_dtype: parameters are float32 or bfloat16, got {text}; set one of the two, and "
            'mixed_precision="fp16" to compute in fp16'
        )
    precision = given.get("precision")
    is_bf16 = precision.get("type") if isinstance(precision, Mapping) else getattr(precision, "type", precision)
    says_no = given.get("mixed_precision") == "no"
    names = (
        ("mixed_precision", *_PRECISION) if kind == "bf16_true" else ("precision",) if is_bf16 == "bf16_true" else ()
    )
    for name in names:
        if name in named and not (name == "mixed_precision" and says_no):
            raise ConfigError(
                f"default_dtype: {text} excludes {name}, got {given[name]!r} for it; leave one of the two out"
            )
    return {"precision": kind} if kind == "bf16_true" else {}
