"""What processes of a job on one node listen on, also where the host's name stands for an address of the network."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest
from program import Process
from two_ranks import SMALL

from forgather_cli.launch.processes import children

# A host called "elsewhere" that has an address of a network, and whose name means that one. Then the program.
ELSEWHERE = """
import fcntl, forks, namespaces, runpy, socket, struct, subprocess, sys
namespaces.enter(namespaces.MOUNT | namespaces.HOST | namespaces.NET)
def set(request, name, value):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, request, struct.pack("16s16s", name, value))
set(0x8914, b"lo", struct.pack("h", 0x1 | 0x8))  # SIOCSIFFLAGS: up
set(0x8916, b"lo:1", struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton("10.77.0.1")))  # SIOCSIFADDR
socket.sethostname("elsewhere")
subprocess.run(["mount", "--bind", "hosts", "/etc/hosts"], check=True)
assert socket.gethostbyname(socket.gethostname()) == "10.77.0.1"
forks._start_ranks_by_forks()  # there
runpy.run_module("forgather_cli", run_name="__main__", alter_sys=True)
"""


def processes(pid: int) -> set[int]:
    """A process and all below it."""
    return {pid}.union(*map(processes, children(pid)))


def listening(pids: set[int]) -> set[str]:
    """Addresses that the processes accept connections on."""
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{min(pids)}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                raw = bytes.fromhex(local.partition(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                found[inode] = str(ip_address(b"".join(words)))
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                held |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
    return {address for inode, address in found.items() if inode in held}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, makes namespaces")
def test_a_job_on_one_node_listens_on_loopback_alone(tmp_path: Path) -> None:
    namespaces = "unshare --map-root-user --net --uts --mount true"
    if subprocess.run(namespaces.split(), capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody make namespaces")
    Path("hosts").write_text("127.0.0.1 localhost\n10.77.0.1 elsewhere\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    train = ["train", *SMALL, "trainer=ddp", "nproc_per_node=2", "max_restarts=1", "max_steps=100000",
             "save_strategy=no"]  # fmt: skip
    with Process(*train, code=ELSEWHERE, env={"TMPDIR": str(temporary)}) as job:
        job.read_until("step 3/")
        ours = processes(job.process.pid)
        assert sum("forgather_cli.worker" in Path(f"/proc/{pid}/cmdline").read_text() for pid in ours) == 2
        addresses = listening(ours)
        assert all(ip_address(address).is_loopback for address in addresses), addresses
        assert addresses  # of gloo: this test sees sockets
        [folder] = temporary.glob("forgather-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        job.process.terminate()
        assert job.finish() == 75, job.output
        assert list(temporary.glob("forgather-*")) == []
