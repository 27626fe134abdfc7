"""What the launcher learns from torchrun's agent."""

from __future__ import annotations

import signal
import sys

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from forgather_cli.launch.agent import exit_code


def test_how_a_rank_ended_is_known_when_the_agent_has_waited_for_it() -> None:
    handler = SubprocessHandler(sys.executable, ("-c", "input()"), {}, None, None, 0, None)
    handler.proc.kill()
    handler.proc.wait()
    assert exit_code(handler.proc.pid) == -signal.SIGKILL
    assert exit_code(1) is None
