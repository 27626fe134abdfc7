"""The training loop and its Python interface."""

from forgather_cli.trainer.arguments import TrainingArguments
from forgather_cli.trainer.evaluate import PredictionOutput
from forgather_cli.trainer.trainer import Trainer, TrainOutput

__all__ = ["PredictionOutput", "TrainOutput", "Trainer", "TrainingArguments"]
