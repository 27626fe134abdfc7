"""How much memory a rank may use: of a GPU, of this machine, or as it is given."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from forgather_cli.config.schema import Config
from forgather_cli.errors import ConfigError
from forgather_cli.launch.layout import plan_layout

GIB = 2**30
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"\s*([\d.]+)\s*([KMGT]?)(I?B)?\s*", re.IGNORECASE)

_CUDA_CONTEXT = int(0.7 * GIB)  # driver, kernels and libraries' workspaces: 0.5 to 0.9 GiB by device and version
_CPU_PROCESS = int(0.42 * GIB)  # Python, torch and what else is imported
_SPARE = 0.06  # share that fragments of free memory take between blocks that are in use


@dataclass(frozen=True)
class Budget:
    """Memory of one rank in bytes."""

    total: int
    kept_back: int
    """For what no plan counts: the process itself, and fragments."""
    on_gpu: bool
    source: str
    """Where ``total`` comes from."""

    @property
    def usable(self) -> int:
        return max(0, self.total - self.kept_back)


def budget_of(config: Config, given: str | None) -> Budget:
    """The memory for a rank of ``config``; ``given`` is that of one device, as typed. Raises ConfigError."""
    on_gpu = uses_gpu(config)
    if given is not None:
        total, source = _parsed(given), "--memory"
        on_gpu = config.device != "cpu"  # of a device that need not be here
    elif on_gpu:
        import torch

        properties = torch.cuda.get_device_properties(0)
        total, source = int(properties.total_memory), properties.name
    else:
        ranks = plan_layout(config).ranks_per_node
        total = _available() // ranks
        source = "available memory of this machine" + (f", shared by {ranks} ranks" if ranks > 1 else "")
    kept_back = (_CUDA_CONTEXT if on_gpu else _CPU_PROCESS) + int(_SPARE * total)
    return Budget(total, kept_back, on_gpu, source)


def uses_gpu(config: Config) -> bool:
    import torch

    return config.device != "cpu" and torch.cuda.is_available()


def _parsed(text: str) -> int:
    """``24GiB``, ``24G`` and ``24GB`` alike: powers of 1024, as devices are sold."""
    found = _SIZE.fullmatch(text)
    try:
        size = int(float(found[1]) * 2 ** _UNITS[found[2].upper()]) if found else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise ConfigError(f"--memory: must be a size such as 24GiB or 800MiB, got {text!r}")
    return size


def _available() -> int:
    """Bytes that processes may still take here: of the machine, or what the container is allowed."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")  # of this process (cgroup v2)
    try:
        return min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no group, or one without a limit
        return free
