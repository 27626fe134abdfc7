"""The optimizer in the backward (``fuse_optim_with_backward``): each gradient is used and freed as soon as it is there.

The gradients never exist together, so clipping by the global norm and accumulation are impossible. After "How to save
memory by fusing the optimizer step into the backward pass" (PyTorch tutorials).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from forgather_cli.config.schema import OptimizerOption
from forgather_cli.errors import SetupError
from forgather_cli.optim.build import NamedParameters, build_optimizer
from forgather_cli.optim.eager import unguard_step
from forgather_cli.optim.state import ParameterOptimizer
from forgather_cli.shards import local

_HANDLE = "_optimizer_in_backward"  # attribute of a parameter: the hook that steps it


class FusedBackward(ParameterOptimizer):
    """Steps every parameter when its gradient is complete, and drops the gradient.

    Groups and state are those of the ordinary optimizers; only the steps are taken parameter by parameter. A parameter
    is stepped by the newest FusedBackward over it, while that lives.
    """

    def __init__(
        self, option: OptimizerOption, named_parameters: NamedParameters, *, lr: float, weight_decay: float
    ) -> None:
        built = build_optimizer(option, named_parameters, lr=lr, weight_decay=weight_decay)
        super().__init__(built.optimizers, built.names)
        self._norms: dict[nn.Parameter, Tensor] = {}
        for optimizer in self.optimizers:
            # One with the same attributes and the same state dictionary, for groups of its own. Not copy.copy: torch's
            # __getstate__ drops everything but state, groups and defaults.
            twin: Optimizer = object.__new__(type(optimizer))
            twin.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
            unguard_step(twin)
            for group in optimizer.param_groups:
                hook = self._hook(twin, group)
                for parameter in group["params"]:
                    _detach(parameter)
                    handle = parameter.register_post_accumulate_grad_hook(hook)
                    setattr(parameter, _HANDLE, handle)

    def _hook(self, stepper: Optimizer, group: dict[str, Any]) -> Callable[[Tensor], None]:
        owner = weakref.ref(self)

        def step(parameter: Tensor) -> None:
            fused = owner()
            if fused is not None:
                fused._step_one(stepper, group, parameter)

        return step

    def _step_one(self, stepper: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if parameter in self._norms:
            raise SetupError(
                f"fuse_optim_with_backward: {self.names[parameter]} got a second gradient within one optimizer step; "
                "set gradient_accumulation_steps=1 or fuse_optim_with_backward=false"
            )
        gradient = local(parameter.grad)
        if gradient.is_pinned():  # before torch 2.13 fully_shard's copy to the host may still be under way here
            torch.cuda.current_stream().synchronize()
        self._norms[parameter] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        own = {**group, "params": [parameter]}  # takes over the learning rate of the moment
        stepper.param_groups = [own]
        stepper.step()
        parameter.grad = None
        if len(own) != len(group) or any(own[key] is not group[key] for key in group if key != "params"):
            raise SetupError(
                f"fuse_optim_with_backward: {type(stepper).__name__} keeps state in its parameter groups and cannot "
                "step parameter by parameter; set fuse_optim_with_backward=false"
            )

    def grad_norm(self, model_group: Any = None, duplicates: Collection[nn.Parameter] = ()) -> Tensor:
        """Collective. L2 norm over all gradients since the last ``step()``, 0-dim fp32, on the device.

        ``model_group`` are the ranks that hold different parameters, or rows of them; ``duplicates`` those of this
        rank that another one counts.
        """
        counted = [norm for parameter, norm in self._norms.items() if parameter not in duplicates]
        norm: Tensor = torch.zeros((), device=next(iter(self.names)).device)
        if counted:
            norm = torch.linalg.vector_norm(torch.stack(counted))
        if model_group is not None:
            norm = norm.square()
            torch.distributed.all_reduce(norm, group=model_group)
            norm = norm.sqrt()
        return norm

    def step(self) -> None:
        """End the step. No gradient is left, so torch's ``step`` only tells its schedulers that one was done."""
        for optimizer in self.optimizers:
            optimizer.step()
        self._norms.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        self._norms.clear()

    def close(self) -> None:
        """Take the hooks off: later backwards leave gradients alone."""
        for parameter in self.names:
            _detach(parameter)


def _detach(parameter: nn.Parameter) -> None:
    handle: RemovableHandle | None = getattr(parameter, _HANDLE, None)
    if handle is not None:
        handle.remove()
        delattr(parameter, _HANDLE)
