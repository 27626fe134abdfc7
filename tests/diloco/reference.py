"""DiLoCo in one process, as its papers write it: workers play in turn, plain PyTorch averages their changes.

Of Forgather only ``Trainer.step`` is used, to train; samples, averages and the outer step are written here again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from forgather_cli.config.schema import Config
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.script import Trainer
from forgather_cli.worker import build

Weights = dict[str, Tensor]


def final_weights(
    configs: list[Config],
    root: Path,
    *,
    rounds: int,
    steps: int,
    fragments: Sequence[frozenset[str]] = (),
    overlap: int = 0,
    alpha: float = 0.5,
    lr: float = 0.7,
    momentum: float = 0.9,
    sent: Callable[[int, str, Tensor], Tensor] = lambda slot, name, change: change,
    published_by: Callable[[int, Weights], None] = lambda rounds, weights: None,
) -> Weights:
    """The global weights after ``rounds`` of so many steps; worker i trains by ``configs[i]``, from the weights of the
    first. Round n exchanges fragment n, the last one all; workers merge what it has made ``overlap`` steps later.

    ``sent``: what the server understands of a worker's change. ``published_by``: is told of the weights after 0, 1, ...
    rounds.
    """
    trainers = [build(config, RunDir(root / str(n)), {}) for n, config in enumerate(configs)]
    for slot, trainer in enumerate(trainers):
        trainer._prepare(False)
        trainer.run.seed_rank = slot << 20
    initial = {name: p.detach().clone() for name, p in trainers[0].model.named_parameters()}
    parameters = {name: torch.nn.Parameter(values.clone()) for name, values in initial.items()}
    outer = torch.optim.SGD(parameters.values(), lr, momentum, nesterov=momentum > 0, foreach=False)
    published = dict(initial)
    local = [{name: values.clone() for name, values in initial.items()} for _ in trainers]
    fragments = fragments or [frozenset(initial)]
    ahead: list[list[int]] = [[] for _ in trainers]  # samples that each was given
    targets: list[list[int]] = [[] for _ in trainers]  # of each of its rounds
    cursor, coming = 0, frozenset[str]()
    published_by(0, published)
    for number in range(rounds):
        for slot, trainer in enumerate(trainers):
            wanted = (steps + overlap) * trainer.run.batch_plan.global_batch - len(ahead[slot])
            ahead[slot] += range(cursor, cursor + wanted)
            cursor += wanted
        for slot, trainer in enumerate(trainers):
            count = 0
            for step in range(steps):
                if coming and step == overlap:  # what the round before has made
                    for name in coming:
                        mine = alpha * local[slot][name] if overlap else torch.zeros_like(published[name])
                        local[slot][name] = torch.add(mine, published[name], alpha=1 - alpha if overlap else 1.0)
                count += _step(trainer, local[slot], ahead[slot])
            targets[slot].append(count)
        names = frozenset(initial) if number == rounds - 1 else fragments[number % len(fragments)]
        recent = [sum(each[-len(fragments) :]) for each in targets]
        for name in names:
            parameters[name].grad = torch.zeros_like(parameters[name])
            for slot, weight in enumerate(recent):
                change = sent(slot, name, published[name] - local[slot][name])
                parameters[name].grad += torch.tensor(weight / sum(recent), dtype=torch.float32) * change
        outer.step()
        outer.zero_grad()
        published |= {name: parameters[name].detach().clone() for name in names}
        coming = names
        published_by(number + 1, published)
    return published


def _step(trainer: Trainer, weights: Weights, ahead: list[int]) -> int:
    """Train ``weights`` for a step on the first samples ``ahead``, which it takes; returns the targets."""
    run = trainer.run
    length, batch = len(run.train_loader.dataset), run.batch_plan.global_batch
    samples = ahead[:batch]
    del ahead[:batch]
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(weights[name])
    ranges = [[sample, sample + 1] for sample in samples]
    run.epochs.load_state_dict({"epoch": samples[0] // length, "sample": samples[0] % length, "ranges": ranges})
    data = run.epochs.next_step()
    trainer.step(data)
    weights |= {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return data.counts.targets
