"""What the process that ``forks`` forks from has imported. Only that process imports this."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import resource
import weakref

import composed
import forks

import forgather_cli
from forgather_cli.config.load import load_config
from forgather_cli.launch.processes import collect_less
from forgather_cli.terminal import bars

collect_less()
composed.share()
bars.SILENCE = bars.Bar.__init__.__kwdefaults__["after"] = 3600.0  # see conftest.py
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the command says so before it imports torch, which comes too late here
for _name in (
    "torch._dynamo", "torch._dynamo.backends.common", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.utils.tensorboard", "hydra", "rich.console", "transformers.trainer_callback",
):  # fmt: skip
    importlib.import_module(_name)
importlib.import_module("tensorboard.summary.writer.event_file_writer")._global_uid._value = 10**6  # see conftest.py
for _module in pkgutil.walk_packages(forgather_cli.__path__, "forgather_cli."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
inspect.stack()  # knows from now on where each module lies: torch's agent asks in every launcher
with contextlib.chdir("/"):  # where no test has put options
    load_config(None, [])  # pydantic's validators and Hydra's plugins are made at first use
    for _trainer in ("single", "ddp", "pipeline", "fsdp2"):  # what two_ranks.SMALL is composed of
        load_config(
            None, ["model=nano", "precision=fp32", "data=synthetic", "callbacks=minimal", f"trainer={_trainer}"]
        )
for _end in weakref.finalize._registry:  # 174 of torch.library's take 0.1 s at the end of each fork, for nothing
    _end.atexit = _end.atexit and _end.peek()[1].__module__ != "torch.library"
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # forks are killed
forks.freeze()
