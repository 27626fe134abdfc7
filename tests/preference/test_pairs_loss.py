"""The losses of pairs against TRL's on the same log-probabilities, and against the papers' formulas in plain torch."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import batch_of, dpo, pairs
from tiny import decoder
from torch import Tensor, nn

N = 5
LENGTHS = torch.tensor([[3, 5], [1, 2], [7, 4], [6, 6], [2, 9]])


def log_probs(seed: int) -> Tensor:
    """Of 5 pairs summed log-probabilities, (N, 2)."""
    return -torch.rand(N, 2, generator=torch.Generator().manual_seed(seed)) * 2 * LENGTHS - 0.1


def ours(**settings: Any) -> Tensor:
    policy, reference = log_probs(0), log_probs(1)
    return dpo(**settings).of_pairs(*policy.unbind(1), *reference.unbind(1), *LENGTHS.unbind(1))


class TRL(nn.Module):
    """A stand-in for the model that TRL asks for log-probabilities: it answers with those above."""

    def forward(self, **batch: Any) -> Any:
        each = torch.zeros(2 * N, 10)
        each[:, 0] = log_probs(0).T.flatten()
        zeros = torch.zeros_like(each)
        return SimpleNamespace(log_probs=each, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)


def theirs(loss_type: str, beta: float) -> tuple[Tensor, dict[str, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports
        from trl import DPOTrainer
    trainer: Any = object.__new__(DPOTrainer)
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer.model, trainer.accelerator, trainer.beta, trainer.loss_types = TRL(), accelerator, beta, [loss_type]
    trainer.loss_weights, trainer.aux_loss_enabled, trainer.ld_alpha = [1.0], False, None
    trainer.precompute_ref_logps, trainer.f_divergence_type, trainer.use_weighting = True, "reverse_kl", False
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": _Lists()}, 0, 1
    mask = torch.arange(11) < 1 + LENGTHS.T.reshape(-1, 1)
    mask[:, 0] = False
    reference = log_probs(1)
    batch = {
        "input_ids": torch.zeros(2 * N, 11, dtype=torch.int64), "attention_mask": torch.ones(2 * N, 11),
        "completion_mask": mask.long(), "ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1],
    }  # fmt: skip
    loss = trainer._compute_loss(trainer.model, batch, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


class _Lists(dict[str, list[float]]):
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sigmoid", {}),
        ("ipo", {"variant": "ipo"}),
        ("hinge", {"variant": "hinge"}),
        ("sigmoid_norm", {"length_normalized": True}),
    ],
)
def test_sigmoid_ipo_hinge_and_length_normalized_are_those_of_trl(name: str, settings: dict[str, Any]) -> None:
    for beta in (0.1, 0.7):
        wanted, _ = theirs(name, beta)
        torch.testing.assert_close(ours(beta=beta, **settings).mean(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", ["orpo", "simpo"])
def test_orpo_and_simpo_are_those_of_trl_experimental_on_means_per_token(variant: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if variant == "orpo":
            from trl.experimental.orpo import ORPOTrainer as Trainer
        else:
            from trl.experimental.cpo import CPOTrainer as Trainer
    trainer: Any = object.__new__(Trainer)
    trainer.beta, trainer.accelerator, trainer.alpha, trainer.loss_type = (
        0.3,
        SimpleNamespace(device="cpu"),
        0.0,
        "simpo",
    )
    trainer.simpo_gamma, trainer.label_smoothing = 0.8, 0.2
    means = log_probs(0) / LENGTHS
    if variant == "orpo":
        # the likelihood of the answer alone, of each pair per token
        wanted = -trainer.odds_ratio_loss(*means.unbind(1))[0] - means[:, 0]
        found = ours(variant="orpo", beta=0.3)
    else:
        wanted = trainer.cpo_loss(*means.unbind(1))[0]
        found = ours(variant="simpo", beta=0.3, gamma=0.8, label_smoothing=0.2)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_beta_is_that_of_the_variant_unless_it_is_given() -> None:
    assert [dpo(variant=name).beta for name in ("sigmoid", "ipo", "hinge", "orpo", "simpo")] == [
        0.1,
        0.1,
        0.1,
        0.1,
        2.0,
    ]
    assert dpo(variant="simpo", beta=0.5).beta == 0.5


def test_label_smoothing_and_sft_weight_are_the_papers_formulas() -> None:
    policy, reference = log_probs(0), log_probs(1)
    margin = 0.1 * ((policy - reference) @ torch.tensor([1.0, -1.0]))
    # Mitchell 2023, "A note on DPO with noisy preferences", eq. 3
    smoothed = 0.8 * -margin.sigmoid().log() + 0.2 * -(-margin).sigmoid().log()
    torch.testing.assert_close(ours(label_smoothing=0.2), smoothed, rtol=1e-6, atol=1e-6)
    sft = -margin.sigmoid().log() - 0.5 * policy[:, 0] / LENGTHS[:, 0]
    torch.testing.assert_close(ours(sft_weight=0.5), sft, rtol=1e-6, atol=1e-6)


def last_token(*args: Tensor) -> Tensor:
    policy_chosen, policy_rejected, reference_chosen, reference_rejected, chosen_lengths, rejected_lengths = args
    return policy_chosen * chosen_lengths - reference_rejected + policy_rejected * reference_chosen / rejected_lengths


def test_a_function_of_the_users_gets_four_log_probabilities_and_two_lengths() -> None:
    from forgather_cli.config.schema import Target

    variant = Target(f"{__name__}.last_token")
    wanted = last_token(*log_probs(0).unbind(1), *log_probs(1).unbind(1), *LENGTHS.unbind(1))
    torch.testing.assert_close(ours(variant=variant), wanted)


def test_odds_of_what_is_certain_have_a_gradient() -> None:
    sure = torch.tensor([[-1e-9, -2.0]]).requires_grad_()
    zeros = torch.zeros(1)
    loss = dpo(variant="orpo").of_pairs(*sure.unbind(1), zeros, zeros, torch.ones(1), torch.ones(1))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert sure.grad is not None
    assert sure.grad.isfinite().all()


# --------------------------------------------------------------------------------------------------- of a model's batch


def plain(model: nn.Module, each: Any, reference: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """Of one pair the sigmoid loss and the log-probabilities of its sides, from logits of each side by itself."""
    sums = []
    for prompt, answer in ((each.prompt, each.chosen), (each.prompt, each.rejected)):
        ids = torch.tensor([prompt + answer])
        found = model(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        sums.append(found[len(prompt) - 1 :].sum())
    margin = beta * ((sums[0] - reference[0]) - (sums[1] - reference[1]))
    return -F.logsigmoid(margin), torch.stack(sums)


@pytest.mark.parametrize("per_row", [1, 3])
def test_loss_gradients_and_metrics_of_a_batch_are_those_of_each_pair_by_itself(per_row: int) -> None:
    from forgather_cli.loss.base import ModelWithLoss, NamedSums

    model, some = decoder(), pairs(7)
    reference = -torch.rand(7, 2, dtype=torch.float64) * 9
    batch = batch_of(some, per_row, reference)
    loss = dpo()
    loss.sums = NamedSums(loss.names, torch.zeros(2, len(loss.names), dtype=torch.float64))
    total = ModelWithLoss(model, loss)(batch)
    total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    told = [plain(model, each, ref.float()) for each, ref in zip(some, reference, strict=True)]
    wanted = torch.stack([value for value, _ in told]).sum()
    wanted.backward()
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-6, msg=name)
    sums = torch.stack([sums for _, sums in told]).double()
    rewards = 0.1 * (sums - reference)
    means = [
        *rewards.mean(0), (rewards[:, 0] - rewards[:, 1]).mean(), (rewards[:, 0] > rewards[:, 1]).double().mean(),
        *sums.mean(0),
    ]  # fmt: skip
    assert loss.sums.table[1].tolist() == [7] * 6
    torch.testing.assert_close(loss.sums.table[0] / 7, torch.stack(means), rtol=1e-5, atol=1e-6)


def test_metrics_are_named_and_computed_as_trls() -> None:
    _, told = theirs("sigmoid", 0.1)
    loss = dpo()
    policy, before = log_probs(0), log_probs(1)
    means = loss._metrics(policy, before, LENGTHS).mean(1)
    for name, value in zip(loss.names, means.tolist(), strict=True):
        assert told[name] == pytest.approx(value, rel=1e-5), name


def test_a_batch_without_targets_has_a_loss_of_zero_with_a_gradient() -> None:
    from forgather_cli.loss.base import ModelWithLoss
    from forgather_cli.strategies.base import empty_batch, without_targets

    model = decoder()
    batch = batch_of(pairs(3), 1, torch.zeros(3, 2, dtype=torch.float64))
    for empty in (without_targets(batch), empty_batch(torch.device("cpu"))):
        total = ModelWithLoss(model, dpo())(empty)
        total.backward()
        assert total.item() == 0
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
