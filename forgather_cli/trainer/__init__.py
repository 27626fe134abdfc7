"""The training loop and its Python interface."""

from forgather_cli.trainer.arguments import TrainingArguments
from forgather_cli.trainer.evaluate import PredictionOutput
from forgather_cli.trainer.script import Trainer
from forgather_cli.trainer.trainer import TrainOutput

__all__ = ["PredictionOutput", "TrainOutput", "Trainer", "TrainingArguments"]
