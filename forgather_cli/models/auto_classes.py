"""Imported once transformers' Auto classes are (``forgather_cli/__init__.py``): they load our encoder-decoder.

Without it they take the modeling file in the model's directory, and only with ``trust_remote_code``.
"""

from __future__ import annotations

from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM

from forgather_cli.models.modeling_qwen3_encdec import Qwen3EncDecConfig, Qwen3ForSeq2SeqLM

AutoConfig.register(Qwen3EncDecConfig.model_type, Qwen3EncDecConfig)
AutoModelForSeq2SeqLM.register(Qwen3EncDecConfig, Qwen3ForSeq2SeqLM)
# save_pretrained then puts the modeling file beside the weights
Qwen3EncDecConfig.register_for_auto_class()  # type: ignore[no-untyped-call]
Qwen3ForSeq2SeqLM.register_for_auto_class("AutoModelForSeq2SeqLM")  # type: ignore[no-untyped-call]
