"""Documents kept apart by kernels instead of a mask, on a CPU: borders, blocks, gradients, memory, recompilation.

``varlen_attn`` is torch's own down to its kernel, which stands in; flex attention runs forward alone (its backward
raises on a CPU).
"""

from __future__ import annotations

import copy
import importlib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from paired import model as encoder_decoder
from test_decoder import decoder, ids
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forgather_cli import hardware
from forgather_cli.data.loaders.prefetch import with_starts
from forgather_cli.models import attention
from forgather_cli.models.decoder import causal_mask
from forgather_cli.strategies.pipeline import chunks, padded, stage_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
T = 300
LENGTHS = [[40, 1, 129, 130], [300], [128, 128, 44], [3, 297]]


def documents(lengths: list[list[int]] = LENGTHS) -> Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]).int()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Models on a CPU do what they do on a GPU, and ``varlen_attn`` takes fp32."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "standins")
    standin = importlib.import_module("varlen_on_cpu")
    monkeypatch.setattr(attention, "DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "HALF", (torch.float32,))
    monkeypatch.setattr("forgather_cli.models.decoder.HALF", (torch.float32,))
    standin.calls.clear()
    return standin


SHAPES: dict[str, dict[str, Any]] = {
    "heads": {},
    "grouped": {"num_key_value_heads": 2},
    "norms": {"qk_norm": True, "num_key_value_heads": 1},
    "window": {"sliding_window": 70, "num_key_value_heads": 2},
    "wide window": {"sliding_window": 1000},
}


@pytest.mark.parametrize("name", SHAPES)
def test_varlen_gives_the_logits_and_gradients_of_the_mask(name: str, kernels: Any, monkeypatch: Any) -> None:
    model, tokens = decoder(**SHAPES[name]), ids(4, T)
    batch = with_starts({"document_ids": documents()})
    weights = torch.randn(4, T, 101, generator=torch.Generator().manual_seed(2))

    def run(**inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        logits = model(tokens, **inputs)
        (logits * weights).sum().backward()
        return logits, [p.grad / p.grad.abs().max() for p in model.parameters() if p.grad is not None]

    found = run(**batch)
    assert len(kernels.calls) == 2
    with monkeypatch.context() as patch:
        patch.setattr(attention, "DEVICES", ())
        expected = run(document_ids=documents())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(kernels.calls) == 2  # the mask's are not its


def dense(blocks: Any, number: Tensor, indices: Tensor) -> Tensor:
    """Blocks as scores, (B, T, T)."""
    rows = torch.zeros(*indices.shape[:-1], 1 + indices.shape[-1], dtype=torch.bool)
    listed = torch.arange(indices.shape[-1]) < number[..., None]
    rows.scatter_(-1, torch.where(listed, indices.long(), indices.shape[-1]), value=True)
    return rows[:, 0, :, :-1].repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :T, :T]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "window of two blocks": {"window": 257},
    "padding": {"pad": True},
    "ids that come again": {"ids": [[0] * 100 + [1] * 100 + [0] * 100] * 4},
}


@pytest.mark.parametrize("name", CASES)
def test_block_mask_is_the_dense_mask(name: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    found = torch.tensor(case["ids"], dtype=torch.int32) if "ids" in case else documents()
    padding = (torch.arange(T) < 290).long().expand(4, T) if "pad" in case else None
    blocks, is_causal = causal_mask(found, 0, case.get("window"), found, padding, 0.0)
    monkeypatch.setattr(attention, "DEVICES", ())
    expected, _ = causal_mask(found, 0, case.get("window"), found, padding, 0.0)
    assert not is_causal
    seen = create_mask(blocks.mask_mod, 4, 1, T, T, device="cpu")[:, 0]
    partial = dense(blocks, blocks.kv_num_blocks, blocks.kv_indices)
    whole = dense(blocks, blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partial & whole).any()
    assert not (whole & ~seen).any()  # the mask is not looked at there
    tokens = slice(None) if padding is None else padding[0].bool()
    assert torch.equal((seen & (partial | whole))[:, tokens], expected[:, 0, tokens])
    assert seen.any(-1).all()
    assert bool(whole.any()) == (name not in ("window", "ids that come again"))
    if name != "ids that come again":  # nothing more is computed than where torch looks at all scores
        assert torch.equal(
            blocks.to_dense(), create_block_mask(blocks.mask_mod, 4, None, T, T, device="cpu").to_dense()
        )


@pytest.mark.full  # it compiles
@torch.no_grad()
def test_flex_gives_the_logits_of_the_mask(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = decoder(num_key_value_heads=2, qk_norm=True, sliding_window=70), ids(4, T)
    found = model(tokens, document_ids=documents())
    assert not kernels.calls
    monkeypatch.setattr(attention, "DEVICES", ())
    torch.testing.assert_close(found, model(tokens, document_ids=documents()), rtol=1e-5, atol=1e-5)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention by its plain products, which nothing has to be compiled for."""
    monkeypatch.setattr(attention, "_compiled", lambda function: function)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
def test_an_encoder_decoder_by_blocks_computes_what_it_does_by_masks(
    kernels: Any, eager_flex: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder_decoder(101)
    read = torch.tensor([[0] * 140 + [1] * 30 + [-1] * 30, [0] * 10 + [1] * 90 + [2] * 100]).int()
    written = torch.tensor([[0] * 50 + [1] * 70 + [-2] * 20, [0] * 3 + [1] * 129 + [2] * 8]).int()
    inputs = {"decoder_input_ids": ids(2, 140), "document_ids": read, "decoder_document_ids": written}
    found = model(ids(2, 200), **inputs)
    padding = (torch.arange(200) < 195).long().expand(2, 200)
    padded = model(ids(2, 200), attention_mask=padding, **inputs)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "DEVICES", ())
        expected = model(ids(2, 200), **inputs)
        expected_padded = model(ids(2, 200), attention_mask=padding, **inputs)
    tokens = written >= 0
    torch.testing.assert_close(found[tokens], expected[tokens], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded[tokens], expected_padded[tokens], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("way", ["mask", "flex", "varlen"])
def test_a_token_of_a_document_moves_no_other(
    way: str, kernels: Any, eager_flex: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "mask":
        monkeypatch.setattr(attention, "DEVICES", ())
    model, tokens, found = decoder(num_key_value_heads=2), ids(4, T), documents()
    batch = with_starts({"document_ids": found}) if way == "varlen" else {"document_ids": found}
    changed = tokens.clone()
    changed[:, 1] = (changed[:, 1] + 1) % 101
    moved = (model(changed, **batch) != model(tokens, **batch)).any(-1)
    assert bool(kernels.calls) == (way == "varlen")
    assert torch.equal(moved, (found == 0) & (torch.arange(T) >= 1))
    if way == "mask":
        return
    two = encoder_decoder(101)
    inputs = {"decoder_input_ids": ids(4, T), "document_ids": found, "decoder_document_ids": found.flip(0)}
    moved = (two(changed, **inputs) != two(tokens, **inputs)).any(-1)
    assert torch.equal(moved, found.flip(0) == 0)  # which are other tokens than those of the encoder


def compiled(scope: str, backend: str) -> tuple[Any, CompileCounterWithBackend]:
    """A model with its blocks or all of it compiled, each as one graph, and what counts the graphs."""
    torch._dynamo.reset()
    model, counter = decoder(num_key_value_heads=2), CompileCounterWithBackend(backend)
    for part in model.model.layers.values() if scope == "blocks" else [model]:
        part.compile(backend=counter, fullgraph=True)
    return model, counter


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_varying_documents_compile_nothing_again(scope: str, kernels: Any) -> None:
    model, counter, tokens = *compiled(scope, "aot_eager"), ids(2, T)
    counts = [[300], [100, 200], [10] * 30, [1] * 299 + [1], [7] * 42 + [6], [5] * 60]
    for lengths in counts:
        batch = with_starts({"document_ids": documents([lengths, [150, 150]])})
        if scope == "model":
            torch._dynamo.maybe_mark_dynamic(batch["document_starts"], 1)  # as the loader does
        model(tokens, **batch).sum().backward()
    assert counter.frame_count == 1
    assert {size for size, _ in kernels.calls} > {33, 65, 129}


@torch.no_grad()
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_varying_blocks_compile_nothing_again(scope: str, kernels: Any) -> None:
    model, counter, tokens = *compiled(scope, "eager"), ids(2, T)
    for lengths in ([300], [100, 200], [10] * 30, [7] * 42 + [6]):
        model(tokens, document_ids=documents([lengths, [150, 150]]))
    assert counter.frame_count == 1


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)), 0)
        return out


@pytest.mark.parametrize("way", ["varlen", "mask"])
def test_live_bytes_are_linear_in_the_length(way: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's fake, forward and backward."""

    def measured(length: int) -> tuple[int, int]:
        batch = with_starts({"document_ids": documents([[length // 4] * 4])})
        kept: dict[Any, int] = {}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model = decoder(num_key_value_heads=2)
            batch = {key: mode.from_tensor(value) for key, value in batch.items()}
            tokens = torch.zeros(1, length, dtype=torch.int64)
            with Largest() as largest:
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                    loss = model(tokens, **batch).sum()
                loss.backward()
        return sum(kept.values()) - sum(p.nbytes for p in model.parameters()), largest.numel

    if way == "mask":
        monkeypatch.setattr(attention, "DEVICES", ())
    (few, small), (many, large) = measured(512), measured(2048)
    is_linear = many <= 4.1 * few and large <= 4 * small
    assert is_linear == (way == "varlen")


def test_starts_are_a_power_of_two_and_only_of_documents_in_order() -> None:
    batch = with_starts({"document_ids": documents()})
    starts = batch["document_starts"]
    assert starts.shape == (4, 16)
    assert starts[0, :5].tolist() == [0, 40, 41, 170, T]
    assert starts[1, :2].tolist() == [0, T]
    assert (starts[:, 4:] == T).all()
    assert with_starts({"document_ids": documents([[1] * T])})["document_starts"].shape == (1, 512)
    again = {"document_ids": torch.tensor([[0, 1, 0]])}
    assert with_starts(again) is again


def test_dropout_of_scores_keeps_the_mask(kernels: Any) -> None:
    model = decoder(attention_dropout=0.1)
    model(ids(4, T), **with_starts({"document_ids": documents()}))
    assert not kernels.calls
    said = attention.kernels_of(model, torch.device("cpu"), torch.float32, 64)
    assert said is not None
    assert "attention_dropout=0.1" in said


def test_kernels_are_told() -> None:
    cpu = torch.device("cpu")
    q = torch.zeros(1, 4, 64, 8, requires_grad=True)
    chosen = torch._fused_sdp_choice(q, q, q, is_causal=True)
    kernel = SDPBackend(chosen).name.lower().removesuffix("_attention")
    assert attention.kernels_of(decoder(), cpu, torch.float32, 64) == kernel
    assert attention.kernels_of(torch.nn.Linear(1, 1), cpu, torch.float32, 64) is None
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        assert hardware.kernel_of(cpu, torch.float32, (4, 2), 8, 64) == "math"


@pytest.mark.parametrize(("dtype", "way"), [(torch.float32, "varlen_attn"), (torch.float64, "flex attention")])
def test_what_keeps_documents_apart_is_told(kernels: Any, dtype: torch.dtype, way: str) -> None:
    cpu = torch.device("cpu")
    assert attention.kernels_of(decoder(), cpu, dtype, 64).endswith(f"documents of a row are kept apart by {way}")


def test_on_hopper_cudnn_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with hardware.kernels_in_order(torch.device("cuda")):
        order = [SDPBackend(n).name.removesuffix("_ATTENTION") for n in torch._C._get_sdp_priority_order()]
        assert order[:4] == ["CUDNN", "FLASH", "EFFICIENT", "MATH"]
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch._C._get_sdp_priority_order() == before
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with hardware.kernels_in_order(torch.device("cuda")):
        assert torch._C._get_sdp_priority_order() == before


def test_another_cudnn_than_torchs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.shadowed_cudnn() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(metadata, "version", {"nvidia-cudnn-cu13": "9.15.1.9"}.__getitem__)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    assert hardware.shadowed_cudnn() is None
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    found = hardware.shadowed_cudnn()
    assert found is not None
    assert "9.10.2" in found[0]
    assert "9.15.1.9" in found[0]


@torch.no_grad()
def test_stages_of_a_pipeline_get_the_starts_of_their_rows(kernels: Any) -> None:
    """Of ``with_starts``'s batch cut by rows, and of hidden states in place of tokens."""
    whole, tokens = decoder(num_key_value_heads=2), ids(4, T)
    stages = [copy.deepcopy(whole), copy.deepcopy(whole)]
    stages[0].cut(0, 0, is_first=True, is_last=False)
    stages[1].cut(1, 1, is_first=False, is_last=True)
    batch = {"input_ids": tokens, "labels": tokens.clone(), **with_starts({"document_ids": documents()})}
    parts = chunks(padded(stage_inputs(batch), 3), 3)  # a row twice
    found = []
    for part in parts:
        inputs = {key: value for key, value in part.items() if key not in ("input_ids", "labels")}
        found.append(stages[1](stages[0](part["input_ids"], **inputs), **inputs))
    assert len(kernels.calls) == 2 * len(parts)
    torch.testing.assert_close(torch.cat(found)[:4], whole(tokens, document_ids=documents()), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_kernel_is_that_of_the_dtype_that_layers_multiply_in(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forgather_cli.models.decoder.HALF", (torch.bfloat16,))
    model, batch = decoder(), with_starts({"document_ids": documents()})

    def takes_varlen(x: Tensor) -> bool:
        return isinstance(model.context(x, **batch).mask, attention.DocumentLine)

    assert not takes_varlen(ids(4, T))
    with torch.autocast("cpu", torch.bfloat16):
        assert takes_varlen(ids(4, T))
    model.model.embeds = False  # as a later stage, with a weight that the head shares
    assert takes_varlen(torch.zeros(4, T, 32, dtype=torch.bfloat16))
    assert not takes_varlen(torch.zeros(4, T, 32))
    model.bfloat16()
    assert takes_varlen(ids(4, T))
