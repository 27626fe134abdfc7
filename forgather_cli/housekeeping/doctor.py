"""``forgather doctor``: what this machine has and can run, and what to mend. torch is imported inside."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import typer

from forgather_cli import __version__
from forgather_cli.cli.output import AsJson, human_bytes, only_json, print_facts, print_json
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import folded

_FIRST = ("forgather", "torch", "python")
_LITTLE, _NOTHING = 1 << 30, 64 << 20  # bytes free on a disk: soon too few, too few for the smallest run


@dataclass(frozen=True)
class Finding:
    """Something to mend."""

    weight: Literal["error", "warning", "to clean"]
    """error: nothing can be trained here as it is."""
    what: str
    remedy: str


Facts = dict[str, Any]


def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, devices, which precisions and kernels they can run, room, ports, leftovers.

    Below the facts stands what to mend, a line each. The exit code is 1 if nothing could be trained here as it is.
    """
    findings: list[Finding] = []
    with only_json(as_json):
        facts = _packages(findings)
        try:
            with doing("importing torch"):
                facts |= _devices(findings, facts["extras"])
            facts |= _compiler(findings)
            with doing("measuring outputs and the cache"):
                facts |= _room(findings)
                _leftovers(findings)
        except ImportError as error:  # of a package that Forgather needs; what comes after it is left out
            findings.append(Finding("error", f"{error.name} cannot be imported ({error})", "install Forgather again"))
    has_error = any(finding.weight == "error" for finding in findings)
    if as_json:
        print_json({**facts, "findings": [asdict(finding) for finding in findings], "can_train": not has_error})
    else:
        print_facts(_page(facts))
        for finding in findings:
            colour = {"error": "red", "warning": "yellow", "to clean": "cyan"}[finding.weight]
            text = folded(f"{finding.weight}: {finding.what}; {finding.remedy}", sys.stdout)
            typer.echo(typer.style(finding.weight, fg=colour) + text.removeprefix(finding.weight))
        if not has_error:
            typer.echo(f"this machine can train, on {facts['devices'][0]['name']}")
    raise typer.Exit(1 if has_error else 0)


def _page(facts: Facts) -> dict[str, str]:
    """The facts for people, a line for each label; what could not be looked at is left out."""
    versions, extras = facts["versions"], facts["extras"]
    missing = [name for name, packages in extras.items() if None in packages.values()]
    there = [f"{package} {version}" for each in extras.values() for package, version in each.items() if version]
    others = [f"{name} {version or 'MISSING'}" for name, version in versions.items() if name not in _FIRST]
    page = {
        "versions": ", ".join(f"{name} {versions.get(name)}" for name in _FIRST) + f" ({sys.executable})",
        "packages": ", ".join(others),
        "extras": "; ".join([", ".join(there) or "none"] + [f"not installed: {', '.join(missing)}"] * bool(missing)),
    }
    if "cpu" in facts:
        cpu = facts["cpu"]
        fast = ", ".join(cpu["instructions"]) or "no fast instructions"
        page["processor"] = f"{cpu['name']}, {cpu['cores']} core{'s' * (cpu['cores'] > 1)}; {fast}"
    for device in facts.get("devices", []):
        memory = f", {human_bytes(device['memory_bytes'])}" if device.get("memory_bytes") else ""
        capability = f", capability {device['capability']}" if device.get("capability") else ""
        runs = ", ".join(f"{name} {how}" for name, how in device["runs"].items())
        page[device["name"]] = f"{device['about']}{memory}{capability}{': ' if runs else ''}{runs}"
    if "room" in facts:
        ports = facts["ports"]
        page["torch.compile"] = facts["compiler"]["cxx"] or "no C++ compiler"
        page["memory"] = f"{human_bytes(facts['memory']['free_bytes'])} of {human_bytes(facts['memory']['bytes'])} free"
        for name, place in facts["room"].items():
            holds = f", holds {human_bytes(place['bytes'])}" if place["bytes"] else ""
            page[name] = f"{place['path']}: {human_bytes(place['free_bytes'])} free{holds}"
        page["control ports"] = f"{ports['first']} to {ports['last']}: {ports['free']} free"
    return page


def _packages(findings: list[Finding]) -> Facts:
    """Versions of what Forgather needs, and of its extras' packages; None where one is not installed."""
    from packaging.requirements import Requirement  # accelerate needs it, so it is there

    def installed(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    versions: dict[str, str | None] = {"forgather": __version__, "python": platform.python_version(),
                                       "torch": installed("torch")}  # fmt: skip
    extras: dict[str, dict[str, str | None]] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):  # run from its source
        for line in metadata.requires("forgather") or []:
            wanted = Requirement(line)
            extra = re.search(r"extra == ['\"](\w+)", line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra[1] if extra else ""}):
                continue
            version = installed(wanted.name)
            if extra is None:
                versions[wanted.name] = version
            elif extra[1] not in ("test", "dev"):
                extras.setdefault(extra[1], {})[wanted.name] = version
            else:
                continue
            install = f"pip install '{wanted.name}{wanted.specifier}'"
            if version is None and extra is None:
                findings.append(Finding("error", f"{wanted.name} is not installed", install))
            elif version is not None and not wanted.specifier.contains(version, prereleases=True):
                findings.append(Finding("warning", f"{wanted.name} is {version}, untested with Forgather", install))
    return {"versions": versions, "extras": extras}


def _devices(findings: list[Finding], extras: dict[str, dict[str, str | None]]) -> Facts:
    """The processor, and what torch can compute on, first what ``device=auto`` takes, with what it can run."""
    from forgather_cli.hardware import bf16_on, has_float8, kernel_of, processor, shadowed_cudnn
    from forgather_cli.launch.layout import gpus
    from forgather_cli.launch.processes import available_cores

    name, instructions = processor()
    cpu = {"name": name, "cores": available_cores(), "instructions": list(instructions)}
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it that the system does not have
        what = f"torch cannot be imported ({str(error).splitlines()[0]})"
        findings.append(Finding("error", what, "install it again, its CPU build where there is no GPU"))
        return {"cpu": cpu, "devices": []}

    def runs(device: torch.device, *, fp16: bool) -> dict[str, str]:
        """Precisions and kernels, and how they run."""
        fp8 = "fast" if has_float8(device) else "emulated"
        torchao = extras.get("quantize", {}).get("torchao") or find_spec("torchao")
        kernels = all(find_spec(package) for package in ("liger_kernel", "cut_cross_entropy"))
        return {
            "bf16": "fast" if bf16_on(str(device))[0] else "slow",
            "fp16": "fast" if fp16 else "emulated",
            "fp8": fp8 if torchao else "needs forgather[quantize]",
            "attention": kernel_of(device, torch.bfloat16, (16, 16), 64, 1024),
            "loss=liger": "needs CUDA" if device.type != "cuda" else "yes" if kernels else "needs forgather[kernels]",
            "loss=cut_cross_entropy": "yes" if kernels else "needs forgather[kernels]",
            "adapter=qlora": "yes" if find_spec("bitsandbytes") else "needs forgather[qlora]",
        }

    devices: list[Facts] = []
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        try:
            about = torch.cuda.get_device_properties(device)
            torch.ones(1, device=device).add_(1).item()  # fails where this torch has no code for the device
            devices.append({"name": str(device), "about": about.name, "memory_bytes": about.total_memory,
                            "free_bytes": torch.cuda.mem_get_info(device)[0],
                            "capability": f"{about.major}.{about.minor}",
                            "runs": runs(device, fp16=True)})  # fmt: skip
        except RuntimeError as error:
            what = f"{device} cannot be used ({str(error).splitlines()[0]})"
            remedy = "see nvidia-smi, set device=cpu, or leave it out by CUDA_VISIBLE_DEVICES"
            findings.append(Finding("error", what, remedy))
    if not torch.cuda.is_available() and (found := gpus()):
        what = f"torch {torch.__version__} cannot use the {len(found)} GPUs of this machine"
        remedy = "install a build of it for CUDA that the driver (nvidia-smi) is new enough for"
        findings.append(Finding("warning", what, remedy))
    if (shadowed := shadowed_cudnn()) is not None:
        findings.append(Finding("warning", *shadowed))
    fp16 = any(name in instructions for name in ("AVX512-FP16", "AMX-FP16"))
    threads = torch.get_num_threads()
    devices.append({"name": "cpu", "about": f"{threads} thread{'s' * (threads > 1)}",
                    "runs": runs(torch.device("cpu"), fp16=fp16)})  # fmt: skip
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "about": "only with device=mps, on which nothing was tested", "runs": {}})
    return {"cpu": cpu, "devices": devices}


def _compiler(findings: list[Finding]) -> Facts:
    """What torch.compile needs: a C++ compiler, and Python's headers for the code that it makes."""
    names = filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))
    cxx = next((path for name in names if (path := shutil.which(name))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if cxx is None:
        findings.append(Finding("warning", "torch_compile=true needs a C++ compiler", "install g++, or set CXX"))
    if not header.exists():
        remedy = "install Python's headers (python3-dev, python3-devel)"
        findings.append(Finding("warning", f"torch_compile=true needs {header}", remedy))
    return {"compiler": {"cxx": cxx, "python_headers": header.exists()}}


def _room(findings: list[Finding]) -> Facts:
    """Memory; disk where runs and the cache go; ports of the control server."""
    from forgather_cli.checkpoint.files import size_of
    from forgather_cli.control.server import PORTS
    from forgather_cli.data.cache import Cache
    from forgather_cli.launch.processes import available_memory
    from forgather_cli.runs.find import OUTPUTS

    remedies = {"outputs": "set output_dir", "cache": "set data.cache_dir or XDG_CACHE_HOME"}
    room = {}
    for name, path in (("outputs", OUTPUTS.absolute()), ("cache", Cache(None).root)):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        room[name] = {"path": str(path), "free_bytes": free, "bytes": size_of(path)}
        if not os.access(there, os.W_OK | os.X_OK):
            findings.append(Finding("error", f"{there} cannot be written to", remedies[name]))
        elif free < _LITTLE:
            weight: Literal["error", "warning"] = "error" if free < _NOTHING else "warning"
            what = f"{human_bytes(free)} are free for {path}"
            findings.append(Finding(weight, what, f"make room (forgather runs list, cache list), or {remedies[name]}"))
    free_ports = 0
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free_ports += 1
    if not free_ports:
        what = f"no port from {PORTS[0]} to {PORTS[-1]} is free: jobs here take no commands"
        findings.append(Finding("warning", what, "set callbacks.control.port, or end what listens there"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ports = {"first": PORTS[0], "last": PORTS[-1], "free": free_ports}
    return {"memory": {"bytes": total, "free_bytes": available_memory()}, "room": room, "ports": ports}


def _leftovers(findings: list[Finding]) -> None:
    """What killed processes have left: temporary folders, entries of the registry, checkpoints, builds of the cache."""
    from forgather_cli.checkpoint.files import siblings, size_of
    from forgather_cli.control.registry import abandoned, jobs_directory
    from forgather_cli.data.cache import Cache, entries
    from forgather_cli.launch.processes import abandoned_folders
    from forgather_cli.launch.run_lock import is_held
    from forgather_cli.runs.find import OUTPUTS, runs_below

    def clean(what: str, remedy: str) -> None:
        findings.append(Finding("to clean", what, remedy))

    if folders := abandoned_folders():
        size, where = human_bytes(sum(map(size_of, folders))), ", ".join(map(str, folders))
        clean(f"temporary folders of killed jobs, {size}: {where}", "the next forgather train or resume removes them")
    if stale := len(list(abandoned())):
        clean(f"entries of killed jobs in {jobs_directory()}: {stale}", "forgather control cleanup --yes removes them")
    for run in runs_below(OUTPUTS) if OUTPUTS.is_dir() else ():
        left = siblings(run.checkpoints) if run.checkpoints.is_dir() else []
        if left and not is_held(run):
            size = human_bytes(sum(size_of(path) for path, _, _ in left))
            clean(f"unfinished checkpoints in {run.checkpoints}, {size}", "forgather resume or runs remove that run")
        if note := run.note_set_aside():
            findings.append(Finding("warning", note, "or remove the run"))
    root = Cache(None).root
    unfinished = [entry for entry in entries(root) if entry.is_unfinished and not entry.in_use]
    if unfinished:
        size = human_bytes(sum(entry.size_bytes for entry in unfinished))
        remedy = "the next run on that data finishes them; else forgather cache prune --older-than 1d"
        clean(f"unfinished builds in {root}, {size}", remedy)
