"""The program on a terminal: what it draws there, keys that are pressed, and a terminal that goes away."""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from multiprocessing.connection import wait

from forks import Program


class Screen(io.StringIO):
    """What a stream of this process is made, so that it is taken for a terminal."""

    def isatty(self) -> bool:
        return True


class Terminal:
    """A process whose controlling terminal is a new pseudo terminal."""

    def __init__(self, *words: str, shell: str = "", code: str = "", width: int = 80) -> None:
        """``shell``: a command line for bash, in which FORGATHER stands for the program. ``code``: what it does
        instead."""
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "TERMINAL_WIDTH")}
        environment |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        self.process: subprocess.Popen[bytes] | Program
        if shell:
            self.process = subprocess.Popen(
                ["bash", "-c", shell.replace("FORGATHER", shlex.join([sys.executable, "-m", "forgather_cli"]))],
                stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )  # fmt: skip
        else:
            command = ("-c", code) if code else ("-m", "forgather_cli", *words)
            self.process = Program(command, os.getcwd(), environment, os.ttyname(slave))
            with self.process.stdout as pipe:
                assert pipe.read() == ""  # it has opened the terminal
        os.close(slave)
        self.output = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character

    def read_until(self, pattern: str | None) -> None:
        """Read until the output matches; None: to the end. Fails after two minutes of silence."""
        while pattern is None or not re.search(pattern, self.output):
            assert wait([self.master], 120), f"no {pattern!r} in {self.output!r}"
            try:
                chunk = os.read(self.master, 65536)
            except OSError:  # Linux's end of a pseudo terminal
                chunk = b""
            if not chunk:
                assert pattern is None, f"no {pattern!r} in {self.output}"
                return
            self.output += self._decoder.decode(chunk)

    def close(self) -> int:
        """Close the terminal, as a lost connection does; returns the exit code."""
        os.close(self.master)
        return self.process.wait(timeout=120)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def finish(self) -> int:
        self.read_until(None)
        return self.close()

    @property
    def bars(self) -> list[str]:
        """Every drawing of the training bar."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output)
        drawn = (line for line in re.split(r"[\r\n]+", plain) if line.startswith("train "))
        return [line.removesuffix("^C").rstrip() for line in drawn]

    def screen(self) -> list[str]:
        """What stands on the terminal in the end, scrolled lines too."""
        rows, row, col = [""], 0, 0
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]", self.output):
            if token == "\r":
                col = 0
            elif token == "\n":
                row += 1
            elif token.endswith("A") and token.startswith("\x1b"):
                row -= int(token[2:-1] or 1)
            elif token == "\x1b[2K":
                rows[row] = ""
            elif not token.startswith("\x1b"):
                row, col = (row + 1, 0) if col == 80 else (row, col)
                rows += [""] * (row + 1 - len(rows))
                rows[row] = rows[row].ljust(col)[:col] + token + rows[row][col + 1 :]
                col += 1
            rows += [""] * (row + 1 - len(rows))
        return [row.rstrip() for row in rows]
