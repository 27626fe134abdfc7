"""The optional package torchao: found before it is needed, and imported without its noise."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from forgather_cli.errors import SetupError

_NOISY = ("torchao", "torch.utils._pytree")
"""At its import torchao 0.18 warns of kernels compiled for other machines, and torch 2.13 of how it registers enums."""


def need_torchao(what: str, module: str = "torchao.quantization") -> None:
    """Import a module of torchao, which takes a second; ``what`` asks for it in the message. Raises SetupError."""
    try:
        with quiet():
            importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").split(".")[0] != "torchao":
            raise SetupError(f"{what}: torchao cannot be imported: {error}") from error
        raise SetupError(f"{what}: needs the package torchao; pip install 'forgather[quantize]'") from error


@contextmanager
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
