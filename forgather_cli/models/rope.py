"""Rotary position embedding: angles in fp32, computed once per forward and shared by all layers.

Legend: B sequences, T tokens, H heads, D head size.

Source: Su et al. 2021, arXiv:2104.09864, in the half-split layout of Hugging Face checkpoints. The scaling types are
those of transformers 5.23, ``modeling_rope_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.config.schema import DecoderSettings, RopeScaling


def _base_frequencies(theta: float | Tensor, dim: int, device: torch.device | None = None) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    return 1.0 / (theta**exponents)


def _yarn(theta: float, dim: int, scaling: RopeScaling, original: int) -> Tensor:
    """Interpolation of slow dimensions, extrapolation of fast ones (Peng et al. 2023, arXiv:2309.00071)."""

    def dimension(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0  # prevents a singularity
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = theta ** (torch.arange(0, dim, 2).float() / dim)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def attention_factor(scaling: RopeScaling) -> float:
    """What cos and sin are multiplied by; only yarn has one other than 1."""
    if scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale()


def rope_frequencies(settings: DecoderSettings) -> Tensor:
    """Radians per position (D / 2), fp32, on the CPU; of ``dynamic`` those within the trained length."""
    assert settings.head_dim is not None
    assert settings.max_position_embeddings is not None
    scaling = settings.rope_scaling or RopeScaling()
    original = scaling.original_max_position_embeddings or settings.max_position_embeddings
    with torch.device("cpu"):
        if scaling.rope_type == "yarn":
            return _yarn(settings.rope_theta, settings.head_dim, scaling, original)
        freqs = _base_frequencies(settings.rope_theta, settings.head_dim)
        factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
        if scaling.rope_type == "linear":  # positions divided by factor (kaiokendev 2023)
            return freqs / factor
        if scaling.rope_type != "llama3":
            return freqs
        # low frequencies divided by factor, high ones kept, a ramp between (Llama 3.1)
        wavelen = 2 * math.pi / freqs
        scaled = torch.where(wavelen > original / low, freqs / factor, freqs)
        smooth = (original / wavelen - low) / (high - low)
        medium = (wavelen >= original / high) & (wavelen <= original / low)
        return torch.where(medium, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


class RotaryEmbedding(nn.Module):
    """Positions to (cos, sin)."""

    inv_freq: Tensor

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self._settings = settings
        scaling = settings.rope_scaling or RopeScaling()
        self.dynamic = scaling.rope_type == "dynamic"
        self._factor = scaling.factor
        self._amplitude = attention_factor(scaling)
        # .to() carries it along to the device that is current: meta while a model is built without memory
        freqs = rope_frequencies(settings)
        self.register_buffer("inv_freq", freqs.to(torch.empty(0).device), persistent=False)

    def reset_buffers(self) -> None:
        """Compute the frequencies anew, on the device they are on."""
        self.inv_freq = rope_frequencies(self._settings).to(self.inv_freq.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # model.to(bfloat16) must not round the angles
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.dtype != torch.float32:
            self.reset_buffers()
        return applied

    @torch.no_grad()
    def forward(self, positions: Tensor, seq_len: int | None) -> tuple[Tensor, Tensor]:
        """What ``rotate`` takes for ``positions`` (T,) or (B, T): cos and signed sin, fp32, (T, 1, D) or (B, T, 1, D).

        ``seq_len`` is the largest position + 1 where the caller knows it without asking the device.
        """
        freqs = self._stretched(positions, seq_len) if self.dynamic else self.inv_freq
        angles = (positions[..., None].float() * freqs)[..., None, :]
        cos, sin = angles.cos(), angles.sin()
        if self._amplitude != 1.0:
            cos, sin = cos * self._amplitude, sin * self._amplitude
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _stretched(self, positions: Tensor, seq_len: int | None) -> Tensor:
        """Dynamic NTK: a base that grows with the length beyond the trained one (bloc97, emozilla 2023)."""
        limit, dim = self._settings.max_position_embeddings, self._settings.head_dim
        assert limit is not None
        assert dim is not None
        if seq_len is not None and seq_len <= limit:
            return self.inv_freq
        longest = positions.max() + 1 if seq_len is None else torch.full((), seq_len, device=positions.device)
        growth = self._factor * longest.clamp(min=limit) / limit - (self._factor - 1)
        return _base_frequencies(self._settings.rope_theta * growth ** (dim / (dim - 2)), dim, positions.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate the pairs (i, i + D/2) of ``x`` (B, T, H, D), computed in fp32, returned in ``dtype``.

    A roll with the signs in ``sin`` takes two thirds of the time of splitting into halves (CPU, forward and backward).
    """
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(dtype)
