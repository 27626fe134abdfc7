"""What ``accelerate config`` of accelerate 1.15 writes, and what its launcher sets for a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forgather_cli.config.accelerate_file import accelerate_settings
from forgather_cli.errors import ConfigError

WRITTEN: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False,
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 1,
    "num_processes": 8, "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False,
    "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
"""Of every file."""


def become_rank_0(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], world: int, here: int) -> None:
    """Set those of accelerate's ``variables`` that say what its file says, and a rank's place."""
    for name, value in variables.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):
            monkeypatch.setenv(name, value)
    place = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": "localhost"}
    for name, number in place.items():
        monkeypatch.setenv(name, str(number))


def wrong(path: Path) -> list[str]:
    """What is wrong with a file, without its name."""
    with pytest.raises(ConfigError) as caught:
        accelerate_settings(path, own_decoder=True)
    return [problem.removeprefix("accelerate_config: ").replace(f" in {path}", "") for problem in caught.value.problems]


def assert_begin(problems: list[str], starts: list[str]) -> None:
    """As many problems, each of which begins so."""
    assert len(problems) == len(starts), problems
    assert [start for start in starts if not any(problem.startswith(start) for problem in problems)] == []
