"""Losses of language models: sums over targets, to be divided by the number of targets of a whole step.

Labels are those of Hugging Face: ``forgather_cli.labels`` says which position predicts which.

``model_io`` prepares what a loss compares, ``sums`` computes cross entropy, ``kernels`` lets other packages do it,
``eval_metrics`` counts beside them; ``base`` is what strategies see, ``build`` makes the one that settings select.
"""

from forgather_cli.labels import IGNORED, label_shift, num_targets, shifted, targets_of
from forgather_cli.loss.base import Loss, ModelWithLoss
from forgather_cli.loss.build import build_loss
from forgather_cli.loss.eval_metrics import EvalMetrics
from forgather_cli.loss.kernels import CutCrossEntropy, Liger
from forgather_cli.loss.losses import (
    ComputedLoss,
    CrossEntropy,
    LinearCrossEntropy,
    LossFn,
    UserFusedLoss,
    UserLoss,
    loss_and_outputs,
)
from forgather_cli.loss.model_io import inputs_of_generation, model_kwargs, model_logits
from forgather_cli.loss.sums import cross_entropy_sum, linear_cross_entropy_sum, product_dtype

__all__ = [
    "IGNORED", "ComputedLoss", "CrossEntropy", "CutCrossEntropy", "EvalMetrics", "Liger", "LinearCrossEntropy", "Loss",
    "LossFn", "ModelWithLoss", "UserFusedLoss", "UserLoss", "build_loss", "cross_entropy_sum", "inputs_of_generation",
    "label_shift", "linear_cross_entropy_sum", "loss_and_outputs", "model_kwargs", "model_logits", "num_targets",
    "product_dtype", "shifted", "targets_of",
]  # fmt: skip
