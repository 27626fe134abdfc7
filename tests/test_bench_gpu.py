"""``scripts/bench/gpu.py`` on a machine without a GPU: its rows on tiny shapes."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from program import Process

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench" / "gpu.py"
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

spec = spec_from_file_location("bench_gpu", SCRIPT)
assert spec is not None
assert spec.loader is not None
gpu = sys.modules[spec.name] = module_from_spec(spec)  # its folder has modules with names of tests' own
spec.loader.exec_module(gpu)


def bench(*words: str, code: int = 0) -> str:
    with Process(str(SCRIPT), *words, code=RUN) as job:
        assert job.finish() == code, job.output
    return job.output


def test_rows_are_measured_once_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    words = ("run", "--rows", "160m,chats", "--device", "cpu", "--out", str(out), "--logs", str(tmp_path))
    words += ("--set", "torch_compile=false")
    bench(*words)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["row"], r["result"], r["tree"], r["set"]) for r in records] == [
        ("160m", "ok", "this", ["torch_compile=false"]),
        ("chats", "ok", "this", ["torch_compile=false"]),
    ]
    for r in records:
        assert r["tokens_per_second"] == pytest.approx(4 * 128 / r["ms"] * 1e3, rel=1e-3)
        assert r["graphs"] == r["recompiled"] == 0
        assert r["shares"]["gemm"] > 0.02
        assert r["shares"]["attention"] > 0.02
    assert len(bench(*words).splitlines()) == 1  # nothing is left
    # what has no such setting says so, and stops nobody
    bench("run", "--rows", "160m", "--device", "cpu", "--out", str(out), "--logs", str(tmp_path), "--set", "no_such=1")
    assert json.loads(out.read_text().splitlines()[-1])["result"] == "not there"


def test_tables_put_rows_beside_the_rival(tmp_path: Path) -> None:
    common = {"on": "NVIDIA H100", "torch": "2.11.0", "set": [], "tree": "this", "micro": 8, "memory": 40.0}
    ok = {"result": "ok", "tokens_per_second": 500_000, "mfu": 0.35, "mfu_attention": 0.41, "shares": {"gemm": 0.6}}
    found = (
        {"row": "1b-loss", "result": "failed", "detail": "OutOfMemoryError: CUDA out of memory\nmore"},
        {"row": "chats", **ok, "ms": 11.0},
        {"row": "chats-whole", **ok, "ms": 10.0},
    )
    out = tmp_path / "found.jsonl"
    out.write_text("".join(json.dumps({**common, **r}) + "\n" for r in found))
    shown = bench("tables", "--out", str(out))
    assert "| 500,000 | 11.0 | 35.0 % | 41.0 % | 40.0 |" in shown
    assert "failed: OutOfMemoryError: CUDA out of memory" in shown
    assert "| 462,000 | 141.9 |" in shown
    assert "chats takes 1.100 of the time of chats-whole" in shown
    assert len({line.count("|") for line in shown.splitlines() if line.startswith("|")}) == 1


def test_kernels_are_told_by_their_names() -> None:
    kinds = {
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN": "gemm",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "gemm",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel...>>": "gemm",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64": "attention",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)": "attention",
        "triton_tem_fused_flex_attention_0": "attention",
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_view_5": "loss",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, c10::BFloat16, float>": "loss",
        "liger_cross_entropy_kernel": "loss",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "optimizer",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3": "reduction",
        "triton_per_fused_add_mul_sum_7": "reduction",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps>>": "reduction",
        "triton_poi_fused_mul_silu_2": "elementwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>": "copy",
        "Memcpy DtoD (Device -> Device)": "copy",
        "Memset (Device)": "copy",
    }
    assert {name: gpu.kind_of(name) for name in kinds} == kinds


def test_a_step_is_idle_while_no_kernel_runs() -> None:
    kernels = [("nvjet_a", 0.0, 40.0), ("Memset (Device)", 30.0, 50.0), ("nvjet_a", 100.0, 140.0)]
    found = gpu.shares(kernels, 2, 100.0)
    assert found["shares"] == {"gemm": 0.4, "copy": 0.1, "idle": 0.55}
    assert found["longest"][0] == ["nvjet_a", 0.4]
    assert found["kernels"] == 2
