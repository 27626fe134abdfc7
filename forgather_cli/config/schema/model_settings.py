"""What all options of the group ``model`` have: their base class."""

from __future__ import annotations

from typing import Any, ClassVar

from forgather_cli.config.schema.base import Option


class ModelSettings(Option):
    """An option of the group ``model``: a network, and where its first weights come from.

    ``maker`` is the module's class, or a function that returns one, without weights, on the device that is current:
    meta as a rule. It is called with ``arguments()`` by name and, where its signature names them and no setting does,
    with ``vocab_size`` (the tokenizer's), ``seq_len`` (of the data, in tokens) and ``num_new`` (how many of the tokens
    the data has added). Weights are drawn by (seed, name): each submodule with parameters has ``reset_parameters()``
    (or ``models/init.py: Fills``), each with buffers ``reset_buffers()``, as far as torch's own do not.

    ``forward(input_ids)``, (B, T) int64, returns logits (B, T, V). It takes ``document_ids``, ``attention_mask`` and
    ``position_ids`` where the data has them (``models/decoder.py``). What else a module has is found by name: ``head``
    and ``hidden_states`` by losses that apply the head themselves, ``cut`` by a pipeline (``models/stages.py:
    Cuttable``), a ``ModuleList`` of blocks by fsdp2, recomputation and compilation, ``is_encoder_decoder`` by the data.
    """

    weights: ClassVar[str] = "forgather_cli.models.build:DrawnWeights"
    """``module:name`` of the class that gives the parameters their first values; of weights in a directory another."""
    directory_setting: ClassVar[str] = ""
    """The field that names the directory with the weights; of a field ``path`` it may be one of the hub."""
    is_encoder_decoder: ClassVar[bool | None] = False
    """Whether it reads examples of two sides; None where only a directory tells."""
    head_gives_logits: ClassVar[bool] = False
    """Whether a loss may apply its ``head`` to its ``hidden_states``, and ``loss=auto`` choose one that does."""
    draws_on_device: ClassVar[bool] = False
    """Whether ``construct_model_on=device`` draws its weights there too: other numbers than on a CPU."""

    vocab_size: int | None = None
    """Its own number of tokens; None: the tokenizer's, or a directory's. A field of options that let it be set."""
    num_sentinel_tokens: int = 0
    """Tokens for spans that the data of an encoder-decoder add to the tokenizer."""

    @property
    def directory(self) -> str | None:
        """The directory with its weights; None where they are drawn."""
        return getattr(self, self.directory_setting) if self.directory_setting else None

    def num_parameters(self, vocab_size: int) -> int:
        """Of the model, or about so many; 0 where nobody knows before it is made. ``vocab_size`` is the tokenizer's."""
        return 0


class WholeSettings(ModelSettings):
    """One whose maker is called with the settings as a whole, ``option``."""

    def arguments(self) -> dict[str, Any]:
        return {"option": self}
