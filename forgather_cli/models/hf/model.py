"""A causal language model of the transformers library behind the calls that strategies, losses and generation make.

Legend: B sequences, T tokens of this call, S positions attended to (T, or more with a cache), V vocabulary,
E hidden size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.errors import ModelError
from forgather_cli.models.cache import KVCache
from forgather_cli.models.hf.documents import masks_of, takes_blocks
from forgather_cli.models.hf.init import InitialValues
from forgather_cli.shards import fill_local

logger = logging.getLogger(__name__)

_LEAVE_TOGETHER = "set isolate_documents=false, or with data=preference, which needs it, choose another model"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")


class CausalLM(nn.Module):
    """Runs a model class of transformers; has its submodules as its own, under the same names.

    So parameters carry Hugging Face's names in checkpoints and optimizer groups, and what a strategy does to a
    submodule (sharding, recomputation, compilation) is done to the one that runs. ``twin`` builds the same model on
    meta, which says how parameters and buffers begin. Raises ModelError for a class with tensors outside of submodules.
    """

    has_plain_head: bool | None = None  # till it has been tried

    def __init__(self, theirs: Any, twin: Callable[[], Any]) -> None:
        super().__init__()
        own = [*theirs._parameters, *theirs._buffers]
        if own:
            raise ModelError(f"model=transformers: {type(theirs).__name__} holds {own[0]} itself, not in a submodule")
        for name, child in theirs.named_children():
            self.add_module(name, child)
        self._theirs = (theirs,)  # in a tuple: not a submodule, its parameters have no second name
        self._twin = twin
        self._accepted = frozenset(inspect.signature(theirs.forward).parameters)
        # The argument of forward that takes keys and values: `past_key_values` up to transformers 5.23, then `cache`. A
        # class with a state (Mamba) keeps no positions in it.
        names = () if getattr(theirs, "_is_stateful", False) else ("cache", "past_key_values")
        self._cache_name = next((name for name in names if name in self._accepted), None)
        self._isolates = self._said_no_cache = False
        self._has_head = getattr(theirs, "lm_head", theirs) is not None  # a stage of a pipeline may have none
        limit = getattr(theirs.config.get_text_config(), "max_position_embeddings", None)
        vocabulary = theirs.get_input_embeddings()
        rows = [m.num_embeddings for m in theirs.modules() if isinstance(m, nn.Embedding) and m is not vocabulary]
        # OPT keeps two rows that no token gets
        has_rows = limit is not None and any(limit <= n <= limit + 2 for n in rows)
        self.max_positions: int | None = limit if has_rows else None
        """Positions that have an embedding each; None for a model that computes them."""

    @property
    def theirs(self) -> Any:
        """The model of the library."""
        return self._theirs[0]

    @property
    def twin(self) -> Callable[[], Any]:
        """Builds the whole model on meta."""
        return self._twin

    @property
    def config(self) -> Any:
        """Its config."""
        return self.theirs.config

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        rows: int = self.theirs.get_input_embeddings().weight.shape[0]
        return rows

    @property
    def document_kernels(self) -> tuple[str, ...]:
        """What keeps documents apart on a GPU; none: a mask."""
        return ("flex attention",) if takes_blocks(self.theirs) else ()

    @property
    def head(self) -> nn.Module:
        """The layer from hidden states to logits. Raises AttributeError where the class has none."""
        found: nn.Module | None = self.theirs.get_output_embeddings()
        if not isinstance(found, nn.Linear):
            raise AttributeError(f"{type(self.theirs).__name__} has no linear output layer")
        return found

    @property
    def num_experts(self) -> int | None:
        """Of a layer, by the config; None where it names none."""
        config = self.config.get_text_config()
        return next((n for key in _EXPERTS if (n := getattr(config, key, None))), None)

    def active_share(self, name: str) -> float:
        """The share of a parameter that one token is multiplied with: below 1 for experts, of which it takes some."""
        config, shape = self.config.get_text_config(), self.get_parameter(name).shape
        experts = self.num_experts
        taken = next((n for key in _EXPERTS_PER_TOKEN if (n := getattr(config, key, None))), None)
        if ".experts." not in name or not experts or not taken or shape[0] != experts:
            return 1.0
        return float(taken / experts)

    @torch.no_grad()
    def reset_all_buffers(self) -> None:
        """Compute the buffers of all submodules, whose memory is new; persistent ones come with the parameters."""
        values, persistent = InitialValues(self._twin()), self.state_dict().keys()
        for name, buffer in self.named_buffers():
            if name not in persistent:
                fill_local(buffer, values.of(name, 0))

    def draw_all(self, seed: int) -> None:
        """Give every parameter its first value: as the class draws it, from a generator seeded by (seed, name).

        One tensor at a time, drawn on the CPU in fp32, is in memory beside the model; of a sharded one this rank keeps
        its rows. Persistent buffers are filled too. Raises ModelError for one that the class does not initialise.
        """
        values = InitialValues(self._twin())
        seen: set[int] = set()
        for name, tensor in self.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                fill_local(tensor, values.of(name, seed))

    def forward(
        self, input_ids: Tensor, *, last_only: bool = False, cache: KVCache | None = None, **inputs: Any
    ) -> Tensor:
        """Logits (B, T, V), or (B, 1, V) of the last position with ``last_only``.

        input_ids (B, T) int64. Of a pipeline's stage it is hidden states (B, T, E) where the embedding is gone, and so
        is what it returns where the head is gone. ``document_ids``, ``attention_mask`` and ``position_ids`` as in
        ``Decoder.forward``, but positions begin anew in each document; other ``inputs`` go to the class as they are.
        ``cache`` stays empty where the class keeps none by position.
        """
        inputs |= {"logits_to_keep": 1} if last_only and "logits_to_keep" in self._accepted else {}
        out = self._run(input_ids, cache, **inputs)
        logits: Tensor = out.logits if self._has_head else out.last_hidden_state
        return logits[:, -1:] if last_only else logits

    def hidden_states(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """What ``head`` is applied to, (B, T, E). Raises ModelError if that does not give the logits.

        The class's own forward runs, with the head replaced by a look at its input.
        """
        seen: list[Tensor] = []
        head, probe = self.head, torch.tensor([[[97.0, -31.0]]])

        def look(x: Tensor) -> Tensor:
            seen.append(x)
            return probe

        head.forward = look
        try:
            logits = self._run(input_ids, None, **inputs).logits
        finally:
            del head.forward
        if not self.has_plain_head:
            self.has_plain_head = len(seen) == 1 and torch.equal(logits, probe)
            if not self.has_plain_head:
                raise ModelError(
                    f"loss: {type(self.theirs).__name__} does more to its logits than its output layer does (a soft "
                    "cap or a scale), which a loss that applies that layer itself leaves out; set loss=cross_entropy"
                )
        return seen[0]

    def _run(self, input_ids: Tensor, cache: KVCache | None, **inputs: Any) -> Any:
        past = 0
        if cache is not None:
            cache.limit = self.max_positions
        if cache is not None and self._cache_name:
            from transformers import DynamicCache

            past = cache.length
            inputs[self._cache_name] = cache.theirs.setdefault(id(self), DynamicCache(config=self.config))
        elif cache is not None and not self._said_no_cache:
            self._said_no_cache = True
            logger.info(
                "%s keeps no keys and values between calls: each token it writes takes it over the whole text again",
                type(self.theirs).__name__,
            )
        if "use_cache" in self._accepted:
            inputs["use_cache"] = self._cache_name in inputs
        self.theirs.training = self.training  # its submodules are ours, which the trainer puts into modes itself
        documents = inputs.pop("document_ids", None)
        if documents is not None:  # whose positions begin anew: a row may be longer than the longest of them
            return self._run_isolated(input_ids, documents, **inputs)
        if self.max_positions is not None and past + input_ids.shape[1] > self.max_positions:
            raise ModelError(
                f"{type(self.theirs).__name__} has {self.max_positions} learned positions, got a sequence of "
                f"{past + input_ids.shape[1]} tokens; make it shorter"
            )
        mask = inputs.get("attention_mask")
        if mask is not None and "position_ids" in self._accepted and inputs.get("position_ids") is None:
            inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)[:, past : past + input_ids.shape[1]]
        out = self._call(input_ids, **inputs)
        if cache is not None and self._cache_name in inputs:
            cache.length += input_ids.shape[1]
        return out

    def _run_isolated(self, input_ids: Tensor, documents: Tensor, **inputs: Any) -> Any:
        """transformers reads borders from positions that begin anew, where it is given no mask."""
        if self._cache_name in inputs:
            raise ValueError("document_ids and cache exclude each other")
        name = type(self.theirs).__name__
        if "position_ids" not in self._accepted or getattr(self.theirs, "_is_stateful", False):
            raise ModelError(f"isolate_documents: {name} cannot keep documents of a sequence apart; {_LEAVE_TOGETHER}")
        inputs["position_ids"] = positions_in_documents(documents, inputs.pop("attention_mask", None))
        with masks_of(documents, self.theirs), nullcontext() if self._isolates else requires_isolation(name):
            out = self._call(input_ids, **inputs)
        self._isolates = True
        return out

    def _call(self, x: Tensor, **inputs: Any) -> Any:
        run = self.theirs if self._has_head else self.theirs.model
        return run(**{"inputs_embeds" if x.is_floating_point() else "input_ids": x}, **inputs)

    def save_files(self, directory: Path, tokenizer: Any) -> None:
        """Write config.json and generation_config.json: the class, the dtype, and the tokenizer's special tokens."""
        config, generation = self.config, getattr(self.theirs, "generation_config", None)
        config.architectures = [type(self.theirs).__name__]
        config.dtype = next(self.parameters()).dtype
        for part in (config, generation):
            if part is not None:
                for name in ("bos_token_id", "eos_token_id"):
                    if getattr(part, name, None) is None and getattr(tokenizer, name, None) is not None:
                        setattr(part, name, getattr(tokenizer, name))
                part.save_pretrained(directory)


# ---------------------------------------------------------------------------------------- documents in one sequence
# A model of transformers keeps them apart by positions: where they begin anew, a document does
# (find_packed_sequence_indices in masking_utils.py, transformers 5). That a class makes its masks so is seen when it is
# asked to.


def positions_in_documents(document_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The place of each token in its document, (B, T) int64. Padding, 0 in ``attention_mask``, is one of its own."""
    ids = document_ids if attention_mask is None else 2 * document_ids + attention_mask.to(document_ids)
    index = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


@contextmanager
def requires_isolation(name: str) -> Iterator[None]:
    """Raises ModelError at the end of a forward that has not looked for documents in its positions."""
    from transformers import masking_utils

    asked: list[Tensor] = []
    find = masking_utils.find_packed_sequence_indices

    def noted(position_ids: Tensor) -> Any:
        asked.append(position_ids)
        return find(position_ids)

    masking_utils.find_packed_sequence_indices = noted
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
    if not asked:
        raise ModelError(f"isolate_documents: {name} makes its masks without looking for documents; {_LEAVE_TOGETHER}")
