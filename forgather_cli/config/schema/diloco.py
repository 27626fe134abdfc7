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

    lr: PositiveFloat = 0.7  # learning rate of the outer step; 1 with momentum=0 is the plain average
    momentum: Probability = 0.9  # of the outer step, from 0 to below 1
    nesterov: bool = True  # look ahead by the momentum; counts only where that is not 0
    delay: PositiveInt | None = None  # async: submissions between two updates of the momentum; null: as many as workers


@settings
class DilocoServerSettings(Settings):
    """The server that brings workers over slow links together (forgather diloco server); rounds are counted from 0."""

    workers: PositiveInt = 2  # workers that the first round waits for; more may join later
    host: str = "127.0.0.1"  # address to listen on; beyond this machine it needs TLS, or insecure=true
    port: Annotated[Count, Le(65535)] = 8512  # TCP port; 0: any free one
    # sync: a round ends when all have sent; async: each submission counts as it comes
    mode: Literal["sync", "async"] = "sync"
    sync_every: PositiveInt = 500  # optimizer steps of each worker in one round
    compression: Wire = "bf16"  # of what workers send: fp32, bf16, int8, int4
    compression_down: Wire = "fp32"  # of what they fetch each round: fp32, or its change in bf16 or int8
    # of int8 and int4 that workers send: up or down at random, so that the mean is right
    stochastic_rounding: bool = False
    outer: OuterSettings = OuterSettings()  # the step on the workers' averaged changes: SGD
    weighting: Literal["tokens", "equal"] = "tokens"  # of the changes: by the targets each has trained on, or equal
    # influence of a member at most, in medians of the members'; null: all are trusted
    max_share: Annotated[float, Ge(1)] | None = 2.0
    quorum: PositiveInt | None = None  # submissions that are enough to end a round; null: all
    grace: NonNegative = 0.0  # seconds that a round still waits for others once the quorum is there
    # seconds of silence after which nobody waits for a worker; null: wait for ever
    eviction: PositiveFloat | None = 120.0
    # seconds after which a round ends with those that have sent; auto: ten times what half of its members needed, at
    # least 600; before half have sent, an hour after the first one, or after half had sent in the round before; null:
    # wait for ever
    round_timeout: PositiveFloat | Literal["auto"] | None = "auto"
    # parts of the model, of which one is exchanged every sync_every / num_fragments steps
    num_fragments: PositiveInt = 1
    overlap: Count = 0  # steps that are trained while an exchange is under way; 0: training waits for it
    alpha: Fraction = 0.5  # share of a worker's own weights where new ones come overlap steps later
    save_every: PositiveInt = 1  # rounds between two checkpoints
    keep: PositiveInt = 3  # newest checkpoints to keep
    max_rounds: PositiveInt | None = None  # end after so many rounds; null: when it is stopped
    max_tokens: PositiveInt | None = None  # end after so many trained targets of all workers
    keep_submissions: bool = False  # keep what workers have sent: forgather diloco replay needs it
    rewind: bool = False  # workers that know rounds that this server has lost: take them back, else refuse them
    # file with the token that workers show; null: DILOCO_TOKEN, or one made in RUN/diloco.token
    token_file: FilePath | None = None
    tls_certificate: FilePath | None = None  # file with the certificate chain (PEM), to serve by TLS
    tls_key: FilePath | None = None  # file with its private key (PEM)
    insecure: bool = False  # listen beyond this machine without TLS: whoever sees the traffic can read and send

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
