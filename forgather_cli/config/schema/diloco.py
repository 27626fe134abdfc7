"""The settings of ``forgather diloco server``, a group of their own that no training run has."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from forgather_cli.config.schema.base import (
    Count,
    FilePath,
    Fraction,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
    settings,
)

Wire = Literal["fp32", "bf16", "int8", "int4"]


@settings
class OuterSettings:
    """The server's own optimizer: SGD on the averaged changes of the workers."""

    lr: PositiveFloat = 0.7
    momentum: Probability = 0.9
    nesterov: bool = True
    delay: PositiveInt | None = None


@settings
class DilocoServerSettings(Settings):
    """How workers are brought together, in seconds and rounds."""

    workers: PositiveInt = 2
    host: str = "127.0.0.1"
    port: Annotated[Count, Le(65535)] = 8512
    mode: Literal["sync", "async"] = "sync"
    sync_every: PositiveInt = 500
    compression: Wire = "bf16"
    compression_down: Wire = "fp32"
    stochastic_rounding: bool = False
    outer: OuterSettings = OuterSettings()
    weighting: Literal["tokens", "equal"] = "tokens"
    max_share: Annotated[float, Ge(1)] | None = 2.0
    quorum: PositiveInt | None = None
    grace: NonNegative = 0.0
    eviction: PositiveFloat | None = 120.0
    round_timeout: PositiveFloat | Literal["auto"] | None = "auto"
    num_fragments: PositiveInt = 1
    overlap: Count = 0
    alpha: Fraction = 0.5
    save_every: PositiveInt = 1
    keep: PositiveInt = 3
    max_rounds: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    keep_submissions: bool = False
    rewind: bool = False
    token_file: FilePath | None = None
    tls_certificate: FilePath | None = None
    tls_key: FilePath | None = None
    insecure: bool = False

    def problems(self, config: Any = None) -> Iterator[str]:
        """``config`` is not read: none of these settings depends on the recipe's."""
        if self.mode == "async":
            fixed = (
                ("num_fragments", 1), ("overlap", 0), ("quorum", None), ("round_timeout", "auto"),
                ("compression_down", "fp32"), ("weighting", "tokens"),
            )  # fmt: skip
            for name, value in fixed:
                if (given := getattr(self, name)) not in (value, None):
                    yield f"diloco.{name}: is of diloco.mode=sync, got {given}; leave it out in async mode"
            if self.outer.momentum and not self.outer.nesterov:
                yield "diloco.outer.nesterov: must be true in async mode with a momentum, got false; leave it out"
        elif self.outer.delay is not None:
            yield f"diloco.outer.delay: is of diloco.mode=async, got {self.outer.delay}; leave it out in sync mode"
        if self.sync_every % self.num_fragments:
            yield (
                f"diloco.num_fragments: must divide diloco.sync_every={self.sync_every}, got {self.num_fragments}; "
                "change one of them"
            )
        elif self.overlap >= (steps := self.sync_every // self.num_fragments):
            yield (
                f"diloco.overlap: must be below the {steps} steps between two exchanges (sync_every / num_fragments), "
                f"got {self.overlap}; set diloco.overlap={steps - 1} or less"
            )
        if self.stochastic_rounding and self.compression not in ("int8", "int4"):
            yield (
                "diloco.stochastic_rounding: counts only with diloco.compression=int8 or int4, got "
                f"compression={self.compression}; leave it out"
            )
        if self.alpha != 0.5 and not self.overlap:
            yield f"diloco.alpha: nothing reads it with diloco.overlap=0, got {self.alpha:g}; set diloco.overlap"
        if self.compression_down == "int4":
            yield "diloco.compression_down: must be fp32, bf16 or int8, got int4; set diloco.compression_down=int8"
        if self.quorum is not None and self.quorum > self.workers:
            yield (
                f"diloco.quorum: is more than diloco.workers={self.workers}, got {self.quorum}; "
                f"set diloco.quorum={self.workers} or less, or null for all"
            )
        if self.grace and self.quorum is None:
            yield f"diloco.grace: nothing reads it with diloco.quorum=null, got {self.grace:g}; set diloco.quorum"
        if (self.tls_certificate is None) != (self.tls_key is None):
            there, lacking = ("tls_certificate", "tls_key")[:: 1 if self.tls_key is None else -1]
            yield f"diloco.{there}: TLS needs the file of diloco.{lacking} too, got none; set diloco.{lacking}=FILE"
        if not (_is_loopback(self.host) or self.tls_certificate or self.insecure):
            yield (
                f"diloco.host: beyond this machine token and weights would travel in the clear, got {self.host}; set "
                "diloco.tls_certificate and diloco.tls_key, use an ssh tunnel to 127.0.0.1, or allow it by "
                "diloco.insecure=true"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
