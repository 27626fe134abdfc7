"""The typed settings of a run: run-level settings, and one dataclass per shipped option of each config group.

Plain frozen dataclasses; no torch is imported. ``config/load.py`` decodes composed YAML into
``Config`` with pydantic, strictly: unknown keys and wrong types are errors. Names are those of Hugging Face
``TrainingArguments`` and ``LlamaConfig`` wherever one exists.

Every group option carries ``type``, which tells its class. An option with ``_target_`` becomes a ``Target``.
"""

from forgather_cli.config.schema.base import (
    Count,
    Fraction,
    Interval,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Probability,
    Target,
    TargetOption,
    settings,
)
from forgather_cli.config.schema.callbacks import (
    EVENTS,
    TRACKERS,
    TRANSFORMS,
    CallbackOption,
    CallbackSettings,
    ControlSettings,
    DivergenceSettings,
    EarlyStoppingSettings,
    GradNormSettings,
    InfoSettings,
    JsonSettings,
    MetricsSettings,
    ParameterNormSettings,
    PeakMemorySettings,
    ProfilerSettings,
    ProgressSettings,
    TensorboardSettings,
    TextgenSettings,
    TrackersSettings,
    WeightNormSettings,
)
from forgather_cli.config.schema.data import (
    DataOption,
    DataTarget,
    HfSettings,
    InstructSettings,
    PythonStdlibSettings,
    SyntheticSettings,
    TextSettings,
    TokensSettings,
)
from forgather_cli.config.schema.hugging_face import HF_PROJECT, without_tokens
from forgather_cli.config.schema.model import (
    DecoderSettings,
    ModelOption,
    PretrainedSettings,
    RopeScaling,
    TransformersSettings,
)
from forgather_cli.config.schema.optimization import (
    AdafactorSettings,
    AdamWSettings,
    Betas,
    ConstantSettings,
    CosineSettings,
    CrossEntropySettings,
    CutCrossEntropySettings,
    FusedLoss,
    GroupSettings,
    InfiniteSettings,
    InverseSqrtSettings,
    KernelLoss,
    LigerSettings,
    LinearCrossEntropySettings,
    LinearSettings,
    LossOption,
    MuonSettings,
    OptimizerOption,
    SchedulerOption,
    SGDSettings,
    TransformersScheduleSettings,
    WSDSettings,
)
from forgather_cli.config.schema.precision import (
    GROUP_SIZES,
    BF16Settings,
    BF16TrueSettings,
    FP8Settings,
    FP16Settings,
    FP32Settings,
    PrecisionOption,
    QATSettings,
    QuantizeRecipe,
)
from forgather_cli.config.schema.run import Config, RunSettings
from forgather_cli.config.schema.trainer import (
    DDPSettings,
    FSDP2Settings,
    PipelineSettings,
    PostLocalSGD,
    Schedule,
    SingleSettings,
    TrainerOption,
)

__all__ = [
    "EVENTS", "GROUP_SIZES", "HF_PROJECT", "TRACKERS", "TRANSFORMS",
    "AdafactorSettings", "AdamWSettings", "BF16Settings", "BF16TrueSettings",
    "Betas", "CallbackOption", "CallbackSettings", "Config", "ConstantSettings", "ControlSettings", "CosineSettings",
    "Count", "CrossEntropySettings", "CutCrossEntropySettings", "DDPSettings", "DataOption", "DataTarget",
    "DecoderSettings", "DivergenceSettings", "EarlyStoppingSettings", "FP8Settings", "FP16Settings", "FP32Settings",
    "FSDP2Settings", "Fraction", "FusedLoss", "GradNormSettings", "GroupSettings", "HfSettings", "InfiniteSettings",
    "InfoSettings", "InstructSettings", "Interval", "InverseSqrtSettings", "JsonSettings", "KernelLoss",
    "LigerSettings", "LinearCrossEntropySettings", "LinearSettings", "LossOption", "MetricsSettings", "ModelOption",
    "MuonSettings", "NonNegative", "OptimizerOption", "ParameterNormSettings", "PeakMemorySettings",
    "PipelineSettings", "PositiveFloat", "PositiveInt", "PostLocalSGD", "PrecisionOption", "PretrainedSettings",
    "Probability", "ProfilerSettings", "ProgressSettings", "PythonStdlibSettings", "QATSettings", "QuantizeRecipe",
    "RopeScaling", "RunSettings", "SGDSettings", "Schedule", "SchedulerOption", "SingleSettings", "SyntheticSettings",
    "Target", "TargetOption", "TensorboardSettings", "TextSettings", "TextgenSettings", "TokensSettings",
    "TrackersSettings", "TrainerOption", "TransformersScheduleSettings", "TransformersSettings", "WSDSettings",
    "WeightNormSettings", "settings", "without_tokens",
]  # fmt: skip
