"""``forgather train --print-sbatch``: the file with which Slurm trains a config, past as many limits as it takes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forgather_cli.errors import ConfigError
from forgather_cli.launch.exit_status import STOPPED
from forgather_cli.launch.layout import gpus, plan_layout, ranks_per_node
from forgather_cli.launch.place import Place
from forgather_cli.launch.processes import available_cores

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded

LIMIT = "24:00:00"
_NOTICE = 300  # seconds before the limit: for a step and a checkpoint
_LEAST = 2 * _NOTICE
_OWN_CORES = 4  # of a rank with a GPU, beside its data workers: the loop, a save, the threads of CUDA and NCCL


def sbatch_file(loaded: Loaded, command: list[str], limit: str) -> str:
    """The file. ``command``: the words after ``forgather`` that start the run here; ``limit``: hours, as ``--time``.

    srun starts a process for each rank, which joins the others by Slurm's variables. The signal goes to them and not to
    the script, since srun, told SIGTERM, would kill its tasks. Raises ConfigError for what cannot be started so.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", limit)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    if ((24 * days + hours) * 60 + minutes) * 60 + seconds < _LEAST:
        raise ConfigError(f"--time: must be HH:MM:SS or D-HH:MM:SS, {_LEAST // 60} minutes or more, got {limit!r}")
    config = loaded.config
    on_gpus = config.device.startswith("cuda") or (config.device == "auto" and bool(gpus()))
    ranks = ranks_per_node(config)
    world = ranks * config.nnodes
    if config.device == "cuda" and config.nproc_per_node == "auto" and ranks > 1 and not gpus():
        raise ConfigError("nproc_per_node: auto counts the GPUs of this machine, which has none; set those of a node")
    plan_layout(config, loaded.given, Place(size=world, by="Slurm") if world > 1 else None)
    cores = _OWN_CORES + config.dataloader_num_workers if on_gpus else max(1, available_cores() // ranks)
    if config.device == "auto" and not on_gpus:
        print(
            "note: device=auto sees no GPU on this machine, so the job asks for none; device=cuda does "
            "(with nproc_per_node, how many on each node)",
            file=sys.stderr,
        )
    if config.output_dir and "output_dir" in loaded.given:
        run, start = shlex.quote(config.output_dir), shlex.join(command)
    else:  # a job keeps its number when it is requeued
        run, start = f'"outputs/{loaded.recipe}/slurm-$SLURM_JOB_ID"', f'{shlex.join(command)} "output_dir=$run"'
    lines = [
        "#!/bin/bash",
        "# What your cluster asks for: fill in, and take away one #.",
        "##SBATCH --account=NAME",
        "##SBATCH --partition=NAME",
        f"#SBATCH --job-name={re.sub('[^A-Za-z0-9._-]+', '_', loaded.recipe)}",
        "#SBATCH --output=%x-%j.out",
        f"#SBATCH --nodes={config.nnodes}",
        f"#SBATCH --ntasks-per-node={ranks}",
        f"#SBATCH --cpus-per-task={cores}",
        *([f"#SBATCH --gres=gpu:{ranks}"] if on_gpus else []),
        f"#SBATCH --time={limit}",
        f"# Every rank is told {_NOTICE} s before the limit: it saves, and exits with {STOPPED}.",
        f"#SBATCH --signal=TERM@{_NOTICE}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "",
        "# module load NAME",
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        f"run={run}",
        'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"',
        f"words=({start})",
        'if [ -e "$run/config.yaml" ]; then words=(resume "$run"); fi',
        f"# Ranks end one after another: the first exit with {STOPPED} must not have srun kill those that still save,",
        "# which it does where the cluster sets KillOnBadExit=1.",
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 \\',
        f'    {shlex.quote(sys.executable)} -m forgather_cli "${{words[@]}}"',
        "code=$?",
        f'if [ $code = {STOPPED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        "exit $code",
    ]
    return "\n".join(lines)
