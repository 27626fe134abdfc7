"""Options of the group ``adapter``, under PEFT's names (``LoraConfig``, peft 0.21)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from forgather_cli.config.schema.base import (
    FilePath,
    Option,
    PositiveFloat,
    PositiveInt,
    Probability,
    Target,
    by_type,
    settings,
)

ALL_LINEAR = "all-linear"


class AdapterSettings(Option):
    """What is trained beside a model in a directory. Its files are those of PEFT's LoRA (``adapters/directory.py``), so
    that whatever has an adapter is a ``LoRASettings``: another one that computes or starts otherwise is a subclass.

    ``maker`` is ``(model, settings, config)`` -> lines for the log: it freezes ``model`` (on meta too) in place and
    gives it its adapters, as ``adapters.model.adapt`` does: ``adapters.layers.Adapted``, which start themselves.
    """

    freezes_base: ClassVar[bool] = True
    """Checkpoints hold what is trained beside the model, and of the model its hash."""
    in_four_bits: ClassVar[bool] = False
    """The frozen matrices are: on one device at a time."""


@settings
class NoAdapter(AdapterSettings):
    """The model itself is trained."""

    freezes_base: ClassVar[bool] = False

    type: Literal["none"] = "none"


@settings
class LoRASettings(AdapterSettings):
    """LoRA: two small matrices beside each of a frozen model's, PEFT's names. Hu et al. 2021, arXiv:2106.09685."""

    maker: ClassVar[str] = "forgather_cli.adapters.model:adapt"
    is_dora: ClassVar[bool] = False
    """The norms of rows are trained too, and layers alone are adapted."""

    type: Literal["lora"] = "lora"
    r: PositiveInt = 16  # rank: numbers that are trained, per row and column of each matrix
    lora_alpha: PositiveFloat = 32.0  # the product is multiplied with lora_alpha / r
    lora_dropout: Probability = 0.0  # of what enters the adapters
    # all but the head; a list of names (q_proj, v_proj), a regular expression of full names
    target_modules: str | list[str] = ALL_LINEAR
    # parameters that are no layers: experts of three dimensions
    target_parameters: list[str] = field(default_factory=list)
    # rows that are trained too: [32000, 32001]; null: of the tokens that the data add
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    use_rslora: bool = False  # lora_alpha / sqrt(r) in place of lora_alpha / r
    # gaussian: A as normal(0, 1 / r) in place of Kaiming's uniform
    init_lora_weights: Literal["gaussian"] | bool = True
    # directory of an adapter, ours or peft's, to go on from; its settings where none are set
    from_adapter: FilePath | None = None
    rank_pattern: dict[str, PositiveInt] = field(default_factory=dict)  # name or regular expression -> r of its layers
    # name or regular expression -> lora_alpha of its layers
    alpha_pattern: dict[str, PositiveFloat] = field(default_factory=dict)

    @property
    def is_for_layers_alone(self) -> bool:
        """Whether no matrix can have such an adapter by the name of its parameter."""
        return bool(self.lora_dropout) or self.is_dora or self.in_four_bits

    def rank_of(self, name: str) -> int:
        """The rank beside the layer of this name."""
        return self.rank_pattern.get(_matching(self.rank_pattern, name), self.r)

    def scaling_of(self, name: str) -> float:
        """What the product beside the layer of this name is multiplied with."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (rank**0.5 if self.use_rslora else rank)

    def alpha_of(self, name: str) -> float:
        """lora_alpha of the layer of this name."""
        return self.alpha_pattern.get(_matching(self.alpha_pattern, name), self.lora_alpha)

    def problems(self, config: Any) -> Iterator[str]:
        if not self.target_modules and not self.target_parameters:
            yield "adapter.target_modules: names nothing to adapt; set target_modules=all-linear, or names of layers"
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            yield from _not_patterns("adapter.target_modules", [self.target_modules])
        yield from _not_patterns("adapter.rank_pattern", self.rank_pattern)
        yield from _not_patterns("adapter.alpha_pattern", self.alpha_pattern)
        if self.target_parameters and self.lora_dropout:
            yield (
                f"adapter.lora_dropout: parameters are adapted without dropout, got {self.lora_dropout:g}; set "
                "lora_dropout=0, or target_parameters=[]"
            )
        if self.target_parameters and self.is_dora:
            yield "adapter: dora adapts layers, got target_parameters; set adapter=lora, or target_parameters=[]"
        model = config.model
        if not isinstance(model, Target) and model.is_encoder_decoder:
            yield f"adapter: {self.type} does not adapt encoder-decoders yet, got model={model.type}; set adapter=none"
        elif not isinstance(model, Target) and model.directory is None:
            yield (
                f"adapter: {self.type} adapts a model that exists, got model={model.type}; set model=pretrained "
                "model.path=DIR"
            )
        if config.average_last is not None:
            yield (
                f"average_last: a mean of adapters is no adapter, got {config.average_last}; set average_last=null, "
                "or average what forgather finalize --merge makes of them"
            )
        if config.precision.maker:
            yield (
                f"precision: {config.precision.type} changes the layers that adapter={self.type} adapts; set "
                "precision=bf16"
            )
        if config.trainer.cuts_layers and config.trainer.shards_parameters:
            yield (
                f"trainer.shard: a pipeline whose stages are sharded does not train adapter={self.type} yet, got "
                f"{config.trainer.shard}; set shard=1, or trainer=fsdp2"
            )


@settings
class DoRASettings(LoRASettings):
    """DoRA: LoRA of each matrix's direction, with the norms of its rows trained beside.

    Liu et al. 2024, arXiv:2402.09353.
    """

    is_dora: ClassVar[bool] = True

    type: Literal["dora"] = "dora"  # type: ignore[assignment]


@settings
class QLoRASettings(LoRASettings):
    """LoRA beside matrices in four bits (NF4, bitsandbytes): needs the extra qlora.

    Dettmers et al. 2023, arXiv:2305.14314.
    """

    in_four_bits: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("qlora", "bitsandbytes")

    type: Literal["qlora"] = "qlora"  # type: ignore[assignment]
    double_quant: bool = True  # the scales of blocks are quantized too

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if not config.trainer.trains_quantized:
            kind = getattr(config.trainer, "type", None)
            yield f"adapter: qlora trains under trainer=single and ddp yet, got trainer={kind}; set adapter=lora"


def _matching(patterns: dict[str, Any], name: str) -> str:
    """The first key that the full name ends with, as a regular expression (peft 0.21, ``get_pattern_key``)."""
    return next((key for key in patterns if ending_in(key).match(name)), name)


@cache
def ending_in(pattern: str) -> re.Pattern[str]:
    """What full names match that end so (peft may write one for each layer, and ``re`` keeps 512)."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _not_patterns(setting: str, patterns: Any) -> Iterator[str]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            yield f"{setting}: not a regular expression ({error}), got {pattern!r}; mend it"


AdapterOption = Annotated[AdapterSettings, by_type]
