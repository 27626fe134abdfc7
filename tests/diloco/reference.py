"""DiLoCo in one process, as its papers write it: workers play in turn, plain PyTorch averages their changes.

Of Forgather only ``Trainer.step`` is used, to train; samples, averages and the outer step are written here again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forgather_cli.config.schema import Config
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.trainer import Trainer
from forgather_cli.worker import build


def final_weights(
    configs: list[Config], root: Path, *, rounds: int, sync_every: int, lr: float = 0.7, momentum: float = 0.9
) -> dict[str, Tensor]:
    """The global weights after ``rounds``; worker i trains by ``configs[i]``, from the weights of the first."""
    trainers = [build(config, RunDir(root / str(n)), {}) for n, config in enumerate(configs)]
    for slot, trainer in enumerate(trainers):
        trainer._prepare(False)
        trainer.run.seed_rank = slot << 20
    master = {name: p.detach().clone() for name, p in trainers[0].model.named_parameters()}
    parameters = [torch.nn.Parameter(p) for p in master.values()]
    outer = torch.optim.SGD(parameters, lr, momentum, nesterov=momentum > 0, foreach=False)
    cursor = 0
    for number in range(rounds):
        changes, targets = [], []
        for trainer in trainers:
            change, count = _trained(trainer, master, number, cursor, sync_every)
            changes.append(change)
            targets.append(count)
            cursor += sync_every * trainer.run.batch_plan.global_batch
        for parameter, name in zip(parameters, master, strict=True):
            parameter.grad = torch.zeros_like(parameter)
            for change, count in zip(changes, targets, strict=True):
                parameter.grad += torch.tensor(count / sum(targets), dtype=torch.float32) * change[name]
        outer.step()
        master = {name: p.detach().clone() for name, p in zip(master, parameters, strict=True)}
    return master


def _trained(
    trainer: Trainer, start: dict[str, Tensor], number: int, cursor: int, steps: int
) -> tuple[dict[str, Tensor], int]:
    """What a worker changes the weights by in a round, start minus end, and how many targets it has counted."""
    run, targets = trainer.run, 0
    assert run.train_loader is not None
    length, batch = len(run.train_loader.dataset), run.batch_plan.global_batch
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(start[name])
    ranges = [[cursor, cursor + steps * batch]]
    run.epochs.load_state_dict({"epoch": cursor // length, "sample": cursor % length, "ranges": ranges})
    for _ in range(steps):
        data = run.epochs.next_step()
        assert data is not None
        targets += data.counts.targets
        trainer.step(data)
    assert run.state.global_step == (number + 1) * steps
    return {name: start[name] - p.detach() for name, p in trainer.model.named_parameters()}, targets
