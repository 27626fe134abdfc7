"""Data parallel: every rank holds the whole model, reads its slice of each batch, and gets the average gradient."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forgather_cli.config.schema import DDPSettings, PrecisionOption
from forgather_cli.distributed import world
from forgather_cli.errors import ConfigError
from forgather_cli.labels import targets_of
from forgather_cli.loss.base import Loss, ModelWithLoss
from forgather_cli.loss.model_io import model_kwargs, model_logits
from forgather_cli.models.transform import shared_halves
from forgather_cli.precision.dtypes import Autocast, autocast_for
from forgather_cli.strategies.base import Batch, GradientSharing, ModelSpec, Strategy, empty_batch, without_targets
from forgather_cli.strategies.comm_hooks import Hook, PowerSGD, SharedAmong, compressed

log = logging.getLogger(__name__)

_HALF = {"bf16_compress": torch.bfloat16, "fp16_compress": torch.float16}


class DataParallel(Strategy):
    """PyTorch's DistributedDataParallel over all ranks of the default process group.

    With one rank, or without a process group, nothing is wrapped and nothing is sent. Evaluation and generation use the
    bare model, without collectives.
    """

    name = "ddp"
    supports_fp16 = DDPSettings.supports_fp16
    supports_compile = True
    compiles_with_loss = DDPSettings.compiles_with_loss
    model_group = None

    def __init__(
        self, device: torch.device, loss: Loss, autocast: Autocast, settings: DDPSettings | None = None
    ) -> None:
        self._world = world()
        self.data_rank, self.data_size = self._world.rank, self._world.size
        self.ddp_group = self._world.group
        self.device = device
        self._loss = loss
        self._autocast = autocast
        self._settings = settings or DDPSettings()
        self._arguments = _arguments(self._settings)
        self._replica: DistributedDataParallel | None = None
        self._local_sgd: SharedAmong | None = None
        self._last_batch: Batch | None = None

    @classmethod
    def from_settings(
        cls, option: DDPSettings, device: torch.device, loss: Loss, precision: PrecisionOption | None
    ) -> DataParallel:
        """Called by ``build_strategy`` with the options of the config."""
        return cls(device, loss, autocast_for(precision, device), option)

    # ------------------------------------------------------------------------------------------------------- set-up

    def materialize(self, spec: ModelSpec) -> None:
        model = spec.transformed(spec.whole())
        spec.fill(model, self.device)
        self.parts = [model]
        # a buffer that is no part of the state follows from settings (rotary frequencies): it is equal everywhere
        has_buffers = any(not isinstance(t, nn.Parameter) for t in model.state_dict(keep_vars=True).values())
        self._sends_buffers = self._settings.broadcast_buffers and has_buffers
        self._with_loss = ModelWithLoss(model, self._loss, spec.compile_with_loss)
        if self._world.size > 1:
            with _unguarded() as unguard:
                self._replica = DistributedDataParallel(
                    _ModelOrZero(self._with_loss),
                    device_ids=[self.device] if self.device.type == "cuda" else None,
                    **self._arguments,
                )
                unguard(self._replica)
            self._replica.broadcast_buffers = self._sends_buffers
            self._rebuild_buckets(model)
            if (hook := self._hook()) is not None:
                # a lambda, since DDP refuses annotations that are strings (torch 2.13, _check_comm_hook)
                self._replica.register_comm_hook(None, lambda state, bucket: hook(bucket))

    def _rebuild_buckets(self, model: nn.Module) -> None:
        """Collective. A backward whose gradients are zero and thrown away; two of them with ``static_graph``.

        After its first backward (second with ``static_graph``) DDP assigns gradients to other buckets (torch 2.13,
        ``Reducer::rebuild_buckets``), and sums over three ranks then round differently. Done before the first step, a
        resumed run rounds as an uninterrupted one.
        """
        if self._settings.find_unused_parameters and not self._settings.static_graph:
            return  # DDP keeps its buckets
        with _state_restored(model, self.device):
            try:
                for _ in range(2 if self._settings.static_graph else 1):
                    self._backward_without_batch()
            except Exception as error:  # of a user's model
                if not self._settings.static_graph:
                    raise
                log.warning(
                    "static_graph: %s cannot be tried with two tokens (%s); on three ranks and more a resumed run will "
                    "differ in rounding from an uninterrupted one",
                    type(model).__name__,
                    error,
                )
        for parameter in model.parameters():
            parameter.grad = None

    def _hook(self) -> Hook | None:
        settings, group = self._settings, self._world.group
        if settings.post_local_sgd.enabled:
            self.gradient_sharing = GradientSharing(settings.post_local_sgd)
            self._local_sgd = SharedAmong(self.gradient_sharing, self._world)
            return self._local_sgd
        if settings.comm_hook == "powersgd":
            self.own_state = powersgd = PowerSGD(group, self.device)
            return powersgd
        return None if settings.comm_hook == "none" else compressed(_HALF[settings.comm_hook], group)

    # ---------------------------------------------------------------------------------------------------- the verbs

    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        share = torch.zeros((), device=self.device)
        synced = False
        if self._local_sgd is not None and self._replica is not None and self.gradient_sharing is not None:
            self._local_sgd.begin_step(step_targets)
            # while each rank trains by itself, buffers too are sent only where the weights were averaged
            self._replica.broadcast_buffers = self._sends_buffers and self.gradient_sharing.weights_are_equal
        # gradients are averaged in the backward of the last micro-batch, which is known only where their number is
        number = len(microbatches) if isinstance(microbatches, Sized) else 0
        with shared_halves(self.parts, self._autocast, self._loss.kernel) if number > 1 else nullcontext():
            for n, batch in enumerate(microbatches, 1):
                synced = n == number
                with self._gradient_sync(synced):
                    loss = self._forward(batch, step_targets) / step_targets
                    if self._local_sgd is not None:
                        self._local_sgd.add_targets(targets_of(batch))
                    (loss * self.data_size).backward()  # DDP divides by the number of ranks
                share += loss.detach()
                if self._reads_graph:
                    self._last_batch = batch
        if not synced and self._replica is not None:
            self._backward_without_batch()
        return share

    def _forward(self, batch: Batch | None, step_targets: Tensor | None) -> Any:
        """Model and loss: the sum over targets. Its backward averages gradients unless ``_gradient_sync`` is off."""
        with self._autocast():
            return (self._replica or self._with_loss)(batch, step_targets)

    def _gradient_sync(self, on: bool) -> AbstractContextManager[None]:
        """Around a forward and backward: on, gradients so far are averaged over ranks; off, they only accumulate."""
        return nullcontext() if on or self._replica is None else self._replica.no_sync()

    def _backward_without_batch(self) -> None:
        """Collective. Take part in the averaging of gradients on a rank whose slice is empty."""
        # None costs nothing, and its zero reaches every parameter of any model
        batch = without_targets(self._last_batch or empty_batch(self.device)) if self._reads_graph else None
        self._forward(batch, None).backward()

    @property
    def _reads_graph(self) -> bool:
        """DDP finds the used parameters in the graph of each step, which must therefore be that of a real batch."""
        return self._settings.static_graph or self._settings.find_unused_parameters

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            return self._with_loss.evaluate(batch), targets_of(batch)

    @torch.no_grad()
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        with self._autocast():
            return model_logits(self.parts[0], model_kwargs(batch), last_only=last_only, cache=cache)


class _ModelOrZero(nn.Module):
    """The model with its loss; without a batch, a zero that depends on every parameter."""

    def __init__(self, with_loss: ModelWithLoss) -> None:
        super().__init__()
        self.with_loss = with_loss

    def forward(self, batch: Batch | None, step_targets: Tensor | None) -> Tensor:
        if batch is not None:
            total: Tensor = self.with_loss(batch, step_targets)
            return total
        # sums over nothing: zero, and so are their gradients, whatever the weights are
        sums = [p.flatten()[:0].sum(dtype=torch.float32) for p in self.parameters() if p.requires_grad]
        return torch.stack(sums).sum()


@contextmanager
def _state_restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores random state and buffers at the end, and compiles nothing for the shapes inside."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    compiles = "torch._dynamo" in sys.modules  # and is not imported to be told not to
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


class _NotImported(ModuleType):
    """Stands for a module that is imported when something is asked of it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


@contextmanager
def _unguarded() -> Iterator[Callable[[DistributedDataParallel], None]]:
    """A wrapper that is made inside, and given to what this yields, does not import torch's compiler: 1.0 s of CPU.

    torch 2.13 asks it how compiled models share gradients (``get_optimize_ddp_mode``), and guards each forward against
    being traced (``_inside_ddp_forward``, with ``_disable_dynamo``). A process that has imported it keeps both, as in
    ``optim.eager``.
    """
    if "torch._dynamo" in sys.modules:
        yield lambda replica: None
        return
    dynamo, utils = _NotImported("torch._dynamo"), _NotImported("torch._dynamo.utils")
    vars(dynamo)["utils"] = utils
    vars(utils)["get_optimize_ddp_mode"] = lambda: "ddp_optimizer"  # the default; who sets another has imported dynamo

    def unguard(replica: DistributedDataParallel) -> None:
        guard = getattr(replica._inside_ddp_forward, "__wrapped__", None)  # inside contextmanager's
        if (forward := getattr(guard, "__wrapped__", None)) is not None:
            vars(replica)["_inside_ddp_forward"] = MethodType(contextmanager(forward), replica)

    torch._dynamo = dynamo
    try:
        yield unguard
    finally:
        if torch._dynamo is dynamo:
            del torch._dynamo  # torch imports it at the next look


def _arguments(settings: DDPSettings) -> dict[str, Any]:
    """DDP's arguments. Raises ConfigError for a setting that the installed torch does not have."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.13 renamed it, and warns at the old name
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    arguments: dict[str, Any] = {
        buffers: settings.broadcast_buffers,
        "init_sync": settings.init_sync,
        "bucket_cap_mb": settings.bucket_cap_mb,
        "find_unused_parameters": settings.find_unused_parameters,
        "gradient_as_bucket_view": settings.gradient_as_bucket_view,
        "static_graph": settings.static_graph,
    }
    if settings.skip_all_reduce_unused_params:
        name = "skip_all_reduce_unused_params"
        if name not in known:
            raise ConfigError(f"{name}: torch {torch.__version__} cannot do it; set it to false, or install torch 2.13")
        arguments[name] = True
    return arguments
