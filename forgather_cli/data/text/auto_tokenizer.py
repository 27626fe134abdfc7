"""What transformers' ``AutoTokenizer`` makes of a tokenizer's files (5.24; 5.18 chooses classes alike).

``PreTrainedTokenizerFast``, the class in the tokenizer_config.json that we write, keeps tokenizer.json as it is. Most
other classes take vocabulary, merges and post-processor from it, and have splitting, normalizer and decoder of their
own. Some types of models get their own class whatever is written (``MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS`` in
``models/auto/tokenization_auto.py``).
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import DataOption
from forgather_cli.data.text.piecewise import QWEN_2
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError

_log = logging.getLogger(__name__)
_QWEN_3_5 = QWEN_2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
OWN_SPLITS = {"qwen2": QWEN_2} | dict.fromkeys(["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"], _QWEN_3_5)
"""model_type -> how the class splits that a model of it always gets; it normalizes with NFC."""
REMEDY = (
    "take a data.tokenizer whose tokenizer.json splits and normalizes as the class does, or a model of another type "
    "(of model=decoder, attention_output_bias=null makes a Llama, with qk_norm=true a Qwen3)"
)


def warn_of_other_ids(model: Any, data: DataOption) -> None:
    """Say so where transformers will give the model's texts other token ids than training.

    ``model``: ours, or one with a ``config`` of transformers. Neither that nor the tokenizer is imported or loaded.
    """
    name, described = getattr(data, "tokenizer", None), [getattr(model, key, None) for key in ("settings", "config")]
    kind = next((kind for each in described if (kind := getattr(each, "model_type", ""))), "")
    if name is None or kind not in OWN_SPLITS or importlib.util.find_spec("transformers") is None:
        return
    if name not in ("bytes", "bpe"):
        file = read_json_object(Path(name).expanduser() / "tokenizer.json", DataError, None)
        split = {"type": "Split", "pattern": {"Regex": OWN_SPLITS[kind]}, "behavior": "Isolated", "invert": False}
        letters = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}  # whatever its trim_offsets
        known = [{"type": "Sequence", "pretokenizers": [split, letters | {"trim_offsets": t}]} for t in (False, True)]
        if file.get("normalizer") == {"type": "NFC"} and file.get("pre_tokenizer") in known:
            return
    _log.warning(
        "data.tokenizer=%s: transformers takes a class of its own for the tokenizer of a model of type %s, whatever is "
        "written, and gives texts other token ids than training, so that finalize will refuse; %s", name, kind, REMEDY
    )  # fmt: skip
