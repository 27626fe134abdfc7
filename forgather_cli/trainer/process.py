"""What a Trainer does to its process: random seeds, log levels, Python's garbage collector, and the heap."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import time

import numpy as np
import torch

from forgather_cli.config.schema import RunSettings
from forgather_cli.distributed import world
from forgather_cli.errors import ConfigError
from forgather_cli.trainer.arguments import ScriptSettings

_MASK = (1 << 64) - 1
_LONG_STEP = 0.1  # seconds of the processor; in a shorter one what is given back is missed
_TRIM_PAUSE = 400
"""Processor time between two calls of malloc_trim, in their own duration: the pages that one gives back are faulted in
again, which takes about seven times as long, so both take 2 % of a run. After every step they took 23 % of tiny's."""


def prepare_process(args: RunSettings, script: ScriptSettings, seed: int) -> None:
    """Seed every generator that users' code may draw from; with ``deterministic`` two runs are bit-identical. Sets the
    format of fp32 products, and the level of our logs, where the settings have one. Raises ConfigError.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers 5.23 reads it for flash-attn
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if (script.log_level, script.log_level_replica) != ("passive", "warning"):  # that library's defaults
        level = script.log_level if world().rank == 0 else script.log_level_replica
        logger = logging.getLogger("forgather_cli")
        if level != "passive":
            logger.setLevel("DEBUG" if level == "detail" else level.upper())
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
    if args.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(args.float32_matmul_precision)
    if script.tf32 is not None:
        if script.tf32 and not torch.cuda.is_available():
            raise ConfigError("tf32: needs a CUDA device, which there is none of, got True; leave it out")
        # not fp32_precision: after that torch 2.13 refuses get_float32_matmul_precision(), which torch.compile calls
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = script.tf32


def mix(*numbers: int) -> int:
    """A 63-bit seed from several numbers: SplitMix64's finalizer (Steele et al. 2014) over each in turn."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the device's generator for one step, so that dropout is a function of (seed, step, rank) alone.

    The generators are seeded directly: ``torch.manual_seed`` takes 59 us, this 1 us (torch 2.13).
    """
    value = mix(seed, step, rank)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


class garbage_collection:
    """Python's collector is off inside and runs every ``gc_steps`` steps, so that ranks do not pause at odd moments.

    On a CPU long steps now and then give back what is free within glibc's heap, or that would be up to a third: torch
    asks ``posix_memalign`` for 64-byte alignment, small blocks move into the gaps that this leaves, and what is freed
    between them is too small for the next block of its size (sourceware.org bug 14581, glibc 2.36).
    """

    def __init__(self, args: RunSettings) -> None:
        self._steps = args.gc_steps
        self._threshold = args.gc_threshold
        self._trim = None if torch.cuda.is_available() else getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._last = self._trim_at = time.process_time()

    def __enter__(self) -> garbage_collection:
        self._was_enabled = gc.isenabled()
        gc.disable()
        self._freezes = gc.get_freeze_count() == 0  # else the program has done so, and wants them to stay frozen
        if self._freezes:
            gc.freeze()  # the libraries' two million objects are not looked through again
        return self

    def __exit__(self, *_: object) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        if step % self._steps == 0:
            gc.collect()
        if self._threshold is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # where more than that share of the device is reserved and a tenth of it can be won
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            held = torch.cuda.memory_stats_as_nested_dict()  # memory_reserved() would sort a hundred names
            reserved, allocated = (held[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
            if reserved > self._threshold * total and reserved - allocated > 0.1 * total:
                torch.cuda.empty_cache()
        now = time.process_time()
        if self._trim is not None and now - self._last > _LONG_STEP and now >= self._trim_at:
            self._trim(0)
            self._trim_at = now + _TRIM_PAUSE * (time.process_time() - now)
        self._last = now
