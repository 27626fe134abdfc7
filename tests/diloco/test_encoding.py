"""Tensors on the wire: what comes back, how many bytes, and that ranks with rows send what one rank would."""

from __future__ import annotations

import pytest
import torch

from forgather_cli.diloco.encoding import BLOCK, Compression, decode, encode, num_bytes

SHAPES = [(5, 300), (3, 4, 65), (4, BLOCK), (2, 1), (0, 4), (7,), ()]
LARGEST_ERROR = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
"""Of what is decoded, of the largest magnitude of its block (bf16: of its value)."""


@pytest.mark.parametrize("compression", LARGEST_ERROR)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_come_back_within_the_step_of_their_block(shape: tuple[int, ...], compression: Compression) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    sent = encode("w", values, compression)
    found = decode("w", sent, shape, compression)
    assert (found.shape, found.dtype) == (values.shape, torch.float32)
    assert sum(tensor.numel() * tensor.element_size() for tensor in sent.values()) == num_bytes(shape, compression)
    if not values.numel():
        return
    if len(shape) < 2 and compression != "bf16":
        assert torch.equal(found, values), "a tensor of one dimension loses nothing"
    reach = values.abs() if compression == "bf16" else values.abs().max()
    assert ((found - values).abs() <= LARGEST_ERROR[compression] * reach * 1.001).all()


@pytest.mark.parametrize("compression", LARGEST_ERROR)
def test_rows_are_encoded_alike_wherever_they_are_cut(compression: Compression) -> None:
    values = torch.randn(9, 3, 100, generator=torch.Generator().manual_seed(2))
    whole = encode("w", values, compression)
    for cut in (0, 1, 5, 9):
        parts = [encode("w", rows, compression) for rows in (values[:cut], values[cut:])]
        assert all(torch.equal(torch.cat([part[name] for part in parts]), whole[name]) for name in whole)


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_error_feedback_sends_in_the_end_what_each_time_was_lost(compression: Compression) -> None:
    value, lost, total = torch.full((4, 64), 1e-3), torch.zeros(4, 64), torch.zeros(4, 64)
    value[:, 0] = 1.0  # beside it the others round to nothing
    for _ in range(200):
        sent = encode("w", value + lost, compression)
        came = decode("w", sent, value.shape, compression)
        lost = value + lost - came
        total += came
    torch.testing.assert_close(total / 200, value, rtol=0, atol=0.08 / 20)
    assert (decode("w", encode("w", value, "int4"), value.shape, "int4")[:, 1:] == 0).all()


def test_zeros_and_a_block_of_zeros_stay_what_they_are() -> None:
    values = torch.zeros(2, 2 * BLOCK)
    values[1, BLOCK:] = 3.0
    for compression in ("int8", "int4"):
        found = decode("w", encode("w", values, compression), values.shape, compression)
        torch.testing.assert_close(found, values)


def test_rounding_at_random_has_the_right_mean_and_can_be_repeated() -> None:
    values = torch.linspace(-1, 1, 256).repeat(400, 1)

    def sent(seed: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        return decode("w", encode("w", values, "int4", random), values.shape, "int4")

    assert torch.equal(sent(1), sent(1))
    assert not torch.equal(sent(1), sent(2))
    step = 1 / 7
    assert (sent(1) - values).abs().max() < step * 1.001
    assert (sent(1).mean(0) - values[0]).abs().max() < 5 * step / (12 * 400) ** 0.5 * 2
