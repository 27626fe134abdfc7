"""What this machine multiplies fast in, and with it what ``precision=auto`` stands for; and the kernels of attention.
torch is imported inside.
"""

from __future__ import annotations

import contextlib
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.config.schema import BF16Settings, FP32Settings, PrecisionOption

if TYPE_CHECKING:
    import torch

_INSTRUCTIONS = {
    "avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "avx512_fp16": "AVX512-FP16",
    "amx_bf16": "AMX-BF16", "amx_fp16": "AMX-FP16", "amx_int8": "AMX-INT8", "sve": "SVE", "bf16": "BF16",
}  # fmt: skip
"""Flags in /proc/cpuinfo that matrix products depend on, x86 and Arm, and their names."""
_FAST_BF16 = ("AVX512-BF16", "AMX-BF16")
_SM80 = (8, 0)  # Ampere, the first with bf16 in its tensor cores


@cache
def cpuinfo() -> dict[str, str]:
    """What Linux says of the last core, by its names ("model name", "flags", ...); empty elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}


@cache
def processor() -> tuple[str, tuple[str, ...]]:
    """This machine's processor: its name, and its instructions that matrix products depend on (AVX512-BF16, ...)."""
    said = cpuinfo()
    flags = (said.get("flags") or said.get("Features") or "").split()
    known = tuple(name for flag, name in _INSTRUCTIONS.items() if flag in flags)
    return said.get("model name") or platform.machine(), known


def gpu_of(device: str) -> Any:
    """torch's properties (name, major, minor, total_memory, ...) of the GPU that ``device`` stands for: auto, cuda,
    cuda:1; None where it stands for none.
    """
    import torch

    kind, _, number = device.partition(":")
    if kind in ("auto", "cuda") and int(number or 0) < torch.cuda.device_count() and torch.cuda.is_available():
        return torch.cuda.get_device_properties(int(number or 0))
    return None


def bf16_on(device: str) -> tuple[bool, str]:
    """Whether a device multiplies faster in bf16 than in fp32, and what says so, for people. ``device``: auto, cuda,
    cuda:1, cpu, mps.
    """
    import torch

    if (about := gpu_of(device)) is not None:
        if torch.version.hip is not None:
            return True, about.name
        fast = (about.major, about.minor) >= _SM80
        return fast, f"{about.name}, sm{about.major}{about.minor}{'' if fast else '; bf16 is fast from sm80'}"
    if device.startswith("cuda") and not torch.cuda.is_available():  # of one that is planned for
        return True, "of CUDA devices from sm80 on; there is none here"
    if device.partition(":")[0] == "mps":
        return False, "bf16 was not tested on mps"
    name, instructions = processor()
    found = [each for each in instructions if each in _FAST_BF16]
    if name.startswith("Intel") and "AVX512-FP16" in instructions and "AMX-BF16" not in found:
        # From Sapphire Rapids on, where a virtual machine hides AMX: 85 GFLOP/s of a core in bf16, 160 in fp32
        # (family 6, model 207, torch 2.13); a step of the default recipe takes 1.41 times as long.
        return False, "this Intel has no AMX, without which its bf16 is slower than fp32"
    return bool(found), f"this processor has {found[0] if found else 'neither AVX512-BF16 nor AMX'}"


def chunk_tokens(gpu: Any) -> int:
    """Tokens of a chunk of ``loss=linear_cross_entropy``, by the memory of what ``gpu_of`` returns.

    For V tokens and width E each chunk of C reads and writes the head's fp32 gradient, 8 V E bytes, beside products of
    6 C V E operations. On an H100 (3.35 TB/s, about 600 TFLOP/s) that adds 239 / C of the products' time: 93 % with 256
    tokens, 6 % with 4,096, 3 % with 8,192. Logits take 6 C V bytes (fp32, and bf16 as their gradient is multiplied): in
    the largest usual vocabulary, 2^17, at most a sixteenth of the memory: 4,096 of 80 GB, 1,024 of 24.
    """
    most = 256 if gpu is None else gpu.total_memory // 16 // (6 * 2**17)
    return min(max(256, 1 << (most.bit_length() - 1)), 8192)


def has_float8(device: torch.device) -> bool:
    """Whether the device multiplies float8 matrices: NVIDIA from Ada and Hopper on, AMD from MI300 on."""
    import torch

    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return re.match(r"gfx(94|95|12)", torch.cuda.get_device_properties(device).gcnArchName) is not None
    return torch.cuda.get_device_capability(device) >= (8, 9)


def without_auto(option: PrecisionOption, device: str) -> tuple[PrecisionOption, str]:
    """``option``, or in the place of ``auto`` bf16 where ``device`` multiplies fast in it and else fp32; and why."""
    if not option.is_open:
        return option, ""
    fast, why = bf16_on(device)
    return BF16Settings() if fast else FP32Settings(), why


def kernels_in_order(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On Hopper cuDNN's attention before FlashAttention 2, which is about half as fast there; the one that takes masks
    and fp32 stays before the products one by one."""
    import torch

    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def kernel_of(device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, length: int) -> str:
    """The kernel of plain causal attention, by torch's name: cudnn, flash, efficient, math. ``heads``: also of keys."""
    import torch
    from torch.nn.attention import SDPBackend

    q, k = (torch.empty(1, n, length, head_dim, device=device, dtype=dtype, requires_grad=True) for n in heads)
    with kernels_in_order(device):
        choice = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=heads[0] != heads[1])
    return SDPBackend(choice).name.lower().removesuffix("_attention")


def shadowed_cudnn() -> tuple[str, str] | None:
    """Where another cuDNN runs than the package that came with torch, and what to do."""
    import torch

    with contextlib.suppress(metadata.PackageNotFoundError):
        shipped = metadata.version(f"nvidia-cudnn-cu{(torch.version.cuda or '').partition('.')[0]}")
        found: Any = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        name = f"{found // 10000}.{found // 100 % 100}.{found % 100}"
        if not f"{shipped}.".startswith(f"{name}."):
            remedy = "take the folder of the system's CUDA out of LD_LIBRARY_PATH"
            return f"cuDNN {name} runs where torch brought {shipped}, which may halve attention's speed", remedy
    return None
