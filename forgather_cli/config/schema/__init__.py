"""The typed settings of a run: run-level settings, and one dataclass per shipped option of each config group.

Plain frozen dataclasses; no torch is imported. ``config/decode.py`` decodes composed YAML into ``Config`` with
pydantic, strictly: unknown keys and wrong types are errors. Names are those of Hugging Face ``TrainingArguments`` and
``LlamaConfig`` wherever one exists.

Every group option has a ``type``, by which its class is found; one with ``_target_`` becomes a ``Target``. Each class
declares its rules beside its fields (``base.Settings.problems``, ``base.OnlyIf``); ``config/rules.py`` checks them.
Further options lie in folders of the package (``folders.py``); here they have their names too.
"""

from forgather_cli.config.schema import callbacks
from forgather_cli.config.schema.adapter import *
from forgather_cli.config.schema.base import *
from forgather_cli.config.schema.callbacks import *
from forgather_cli.config.schema.data import *
from forgather_cli.config.schema.decoder import *
from forgather_cli.config.schema.diloco import *
from forgather_cli.config.schema.encoder_decoder import *
from forgather_cli.config.schema.folders import import_options
from forgather_cli.config.schema.loss import *
from forgather_cli.config.schema.model import *
from forgather_cli.config.schema.optimizer import *
from forgather_cli.config.schema.paired import *
from forgather_cli.config.schema.precision import *
from forgather_cli.config.schema.run import *
from forgather_cli.config.schema.sampling import *
from forgather_cli.config.schema.scheduler import *
from forgather_cli.config.schema.trainer import *

globals().update({option.__name__: option for option in import_options()})
callbacks.finish()
