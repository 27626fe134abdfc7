"""Models that cannot fit are refused before anything is built, and none that can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.errors import SetupError
from forgather_cli.launch.layout import Layout, plan_layout
from forgather_cli.launch.memory import check_memory, gpu_memory, host_memory

CPU = ["model=decoder", "precision=fp32", "optimizer=adamw", "device=cpu"]


def config_of(*words: str) -> Config:
    return load_config(None, [*CPU, *words]).config


def layers_in(memory: float) -> int:
    """As many as take so many bytes for weights, gradients and moments in fp32 with AdamW."""
    return max(1, int(memory / (16 * config_of().model.layer_parameters())))


def layers(share: float) -> int:
    """As many as take ``share`` of this machine's memory."""
    return layers_in(host_memory() * share)


def refused(config: Config, num_layers: int | None = None, layout: Layout | None = None) -> str | None:
    if num_layers is not None:
        config = replace(config, model=replace(config.model, num_hidden_layers=num_layers))
    try:
        check_memory(config, layout or plan_layout(config))
    except SetupError as error:
        return str(error)
    return None


DDP, FSDP2 = ["trainer=ddp", "nproc_per_node=2"], ["trainer=fsdp2", "nproc_per_node=2"]
PIPELINE = ["trainer=pipeline", "nproc_per_node=2"]
NODES = ["nnodes=4", "rdzv_endpoint=a:1"]
# overrides: shares of the memory that the whole model would take under CPU's settings, which fits and which does not
CASES: dict[str, tuple[list[str], float | None, float | None]] = {
    "all of it": ([], 0.9, 1.05),
    "half of each number": (["precision=bf16_true"], 1.9, 2.1),
    "momentum alone": (["optimizer=muon"], 1.2, 1.4),
    "no moments in a group": (["+optimizer.groups.mlp={regex: mlp, optimizer: {type: sgd}}"], 1.9, None),
    "no gradients": (["fuse_optim_with_backward=true", "max_grad_norm=null"], 1.3, None),
    "a copy on each rank": (DDP, 0.45, 0.6),
    "shards of all ranks here": (FSDP2, None, 1.05),
    "shards on several nodes": ([*FSDP2, *NODES], 3.8, 4.2),
    "copies of shards on several nodes": ([*FSDP2, *NODES, "replicate=4"], None, 1.05),
    "offloaded shards": ([*FSDP2, "cpu_offload=true"], None, 1.05),
    "stages": (PIPELINE, 0.95, 1.05),
    "stages on other nodes": (
        [*PIPELINE, *NODES, "n_microbatches=8", "global_batch_size=16", "num_hidden_layers=8"], 9.0, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_fit_is_refused_and_nothing_else(case: str) -> None:
    words, fits, too_much = CASES[case]
    config = config_of(*words)
    assert fits is None or refused(config, layers(fits)) is None
    if too_much is not None:
        message = refused(config, layers(too_much))
        assert f"model.num_hidden_layers={layers(too_much)}, model.hidden_size=256" in message
        assert "trainer=fsdp2" in message


def test_ranks_that_somebody_has_started_may_be_elsewhere() -> None:
    joined = Layout(ranks_per_node=8, joined="torchrun")
    assert refused(config_of("trainer=ddp"), layers(0.9), joined) is None
    assert refused(config_of("trainer=fsdp2"), layers(7.5), joined) is None
    assert refused(config_of("trainer=fsdp2"), layers(8.5), joined)


def test_the_vocabulary_is_named_where_it_is_the_largest_part() -> None:
    message = refused(config_of("model.vocab_size=1000000000"))
    assert message.startswith("model.vocab_size=1000000000, model.hidden_size=256: ")
    assert "7,629 GiB" in message  # 2 x 1e9 x 256 x 16 bytes
    paired = ["model=qwen3_encdec", "data=ul2"]
    assert "3,815 GiB" in refused(config_of(*paired, "model.vocab_size=1000000000"))  # tied
    assert refused(config_of(*paired, "model.init_from=/nowhere")) is None  # its shape is that of the directory


def test_on_gpus_each_rank_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '10000\\n20000\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpu_memory() == 20000 * 2**20
    ddp, fsdp2, offloaded = (config_of(*words, "device=cuda") for words in (DDP, FSDP2, [*FSDP2, "cpu_offload=true"]))
    whole, more = map(layers_in, (20000 * 2**20, 21000 * 2**20))  # the larger one's, and more
    assert refused(ddp, whole) is None
    assert "a GPU has 20" in refused(ddp, more)
    assert refused(fsdp2, more) is None
    assert refused(offloaded, more) is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_memory() is None
    assert refused(ddp, more) is None
