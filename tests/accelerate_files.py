"""What ``accelerate config`` of accelerate 1.15 writes, and what its launcher sets for a rank."""

from __future__ import annotations

from typing import Any

import pytest

WRITTEN: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
"""Of every file."""


def become_rank_0(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], world: int, here: int) -> None:
    """Set those of accelerate's ``variables`` that say what its file says, and a rank's place."""
    for name, value in variables.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):
            monkeypatch.setenv(name, value)
    place = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": "localhost"}
    for name, number in place.items():
        monkeypatch.setenv(name, str(number))
