"""Real workers under a real server: what comes out is what one process computes, whatever is killed on the way."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from diloco.client import FakeWorker, Served, serving
from diloco.reference import final_weights
from diloco.workers import ALL, BATCH, RECIPE, ROUNDS, STEPS, composed, finish, largest_difference, served, worker
from program import forgather, until
from safetensors.torch import load_file
from torch import Tensor

from forgather_cli.diloco.fragments import fragments
from forgather_cli.run_dir import RunDir

AVERAGE = ("diloco.outer.lr=1.0", "diloco.outer.momentum=0.0", "diloco.outer.nesterov=false")
SGD = ("optimizer=sgd", "learning_rate=0.1", "warmup_steps=0", "lr_scheduler=constant", "max_grad_norm=null")


def trained(server: Served, settings: Sequence[Sequence[str]]) -> list[RunDir]:
    """Train workers a, b, ... to their end."""
    names = "abc"[: len(settings)]
    finish(*[worker(server, name, *own) for name, own in zip(names, settings, strict=True)])
    return [RunDir(server.run.root.with_name(name)) for name in names]


def global_weights(server: Served, after: int) -> dict[str, Tensor]:
    until(lambda: server.is_at(after))
    return server.client.weights(after)


def weights_of(run: RunDir) -> dict[str, Tensor]:
    return load_file(run.checkpoint(run.checkpoint_steps()[-1]) / "model" / "model.safetensors")


STREAMING = ("diloco.num_fragments=2", f"diloco.sync_every={2 * STEPS}", "diloco.overlap=2", "diloco.alpha=0.25")


@pytest.mark.parametrize("settings", [(), STREAMING], ids=["whole", "streaming"])
def test_killed_workers_and_server_end_with_the_weights_of_one_process_that_plays_them(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    with served(tmp_path, *settings) as server:
        a, b = (worker(server, name, ALL) for name in "ab")
        until(lambda: 4 in RunDir(tmp_path / "a").checkpoint_steps())  # in the second round, an exchange under way
        a.process.send_signal(signal.SIGKILL)
        server.process.kill()
        a.finish()
        with serving(server.run.root, f"diloco.port={server.client.port}", resume=True) as again:
            a = worker(again, "a", ALL)
            finish(a, b)
            until(lambda: again.is_at(ROUNDS))
            found, used = again.client.latest(), again.used_samples()
    expected = final_weights(
        [composed(ALL)] * 2, tmp_path / "reference", rounds=ROUNDS, steps=STEPS,
        **({"fragments": fragments({n: tuple(t.shape) for n, t in found.items()}, 2), "overlap": 2, "alpha": 0.25}
           if settings else {}),
    )  # fmt: skip
    assert largest_difference(found, expected) == 0.0
    count = 2 * ROUNDS * STEPS * BATCH
    assert len(set(used)) == len(used) == count, "each once, also after the end of an epoch"
    assert settings or used == list(range(count))


def test_async_workers_train_at_their_own_pace_and_the_ledger_says_what_came_out(tmp_path: Path) -> None:
    with served(tmp_path, "diloco.mode=async", "diloco.keep_submissions=true") as server:
        own = ("max_steps=24", "callbacks.diloco.dylu=true")
        stands = "+callbacks.glitch={_target_:diloco.glitches.Slow,after:1}"
        first, second = worker(server, "a", *own, stands), worker(server, "b", *own, stands, "global_batch_size=8")
        for name in "ab":
            until((tmp_path / name / "slow").exists)
        (tmp_path / "a" / "go").touch()
        until(lambda: server.is_at(3))  # the second and third of a's rounds passed while b stood in its first
        first.process.send_signal(signal.SIGKILL)
        first.finish()
        (tmp_path / "b" / "go").touch()
        until(lambda: second.process.poll() is not None)
        first = worker(server, "a", *own)
        finish(first, second)
        assert forgather("diloco", "stop", "--now", str(server.run.root)) == 0
    assert forgather("diloco", "replay", str(server.run.root)) == 0
    lines, samples = server.ledger(), server.used_samples()
    assert len(samples) == len(set(samples))
    counted = [sent for line in lines if line["closed"] for sent in line["closed"]["submissions"]]
    assert {sent["worker"] for sent in counted} == {"a", "b"}
    ages = [line["round"] - sent["round"] for line in lines if line["closed"] for sent in line["closed"]["submissions"]]
    assert max(ages) > 1, "some came while another trained"
    assert any(member["steps"] < STEPS for line in lines for member in line["members"]), "the slower has fewer steps"


def test_workers_of_several_ranks_agree_with_one_device(tmp_path: Path) -> None:
    layouts = (["trainer=fsdp2", "nproc_per_node=2"], ["trainer=pipeline", "nproc_per_node=2", "n_microbatches=2"])
    with served(tmp_path) as server:
        runs = trained(server, [[ALL, *layout] for layout in layouts])
        status, found = server.client.status(), global_weights(server, ROUNDS)
    last = [json.loads(run.metrics.read_text().splitlines()[-1]) for run in runs]
    for way, at_server in (("sent", status["received"]), ("received", status["sent"])):  # of all ranks, and messages
        told = sum(record[f"diloco/bytes_{way}"] for record in last)
        assert at_server < told < 1.1 * at_server
    expected = final_weights([composed(ALL)] * 2, tmp_path / "reference", rounds=ROUNDS, steps=STEPS)
    assert largest_difference(found, expected) < 1e-5


def test_without_averaging_it_is_the_plain_run(tmp_path: Path) -> None:
    with served(tmp_path, *AVERAGE, workers=1) as server:
        (run,) = trained(server, [[ALL]])
        found = global_weights(server, ROUNDS)
    for name, more in (("plain", ()), ("idle", ("+callbacks.diloco={}",))):
        assert forgather("train", *RECIPE, ALL, *more, f"output_dir={tmp_path / name}") == 0
    plain, idle = (weights_of(RunDir(tmp_path / name)) for name in ("plain", "idle"))
    assert largest_difference(idle, plain) == 0.0
    assert largest_difference(weights_of(run), plain) < 1e-6
    assert largest_difference(found, {name: plain[name] for name in found}) < 1e-6


def test_averages_of_single_sgd_steps_are_data_parallel_training(tmp_path: Path) -> None:
    ragged = "data.ragged=true"  # so that tokens weigh
    with served(tmp_path, ragged, *AVERAGE, "diloco.sync_every=1") as server:
        trained(server, [["max_steps=3", ragged, *SGD]] * 2)
        found = global_weights(server, 3)
    whole = [*RECIPE, "max_steps=3", ragged, *SGD, f"global_batch_size={2 * BATCH}"]
    assert forgather("train", *whole, f"output_dir={tmp_path / 'whole'}") == 0
    expected = weights_of(RunDir(tmp_path / "whole"))
    assert largest_difference(found, {name: expected[name] for name in found}) < 1e-6


def test_of_an_adapter_what_is_trained_travels_alone(tmp_path: Path) -> None:
    """As data-parallel training of it; the server's checkpoints are adapters too."""
    assert forgather("train", *RECIPE, "max_steps=1", "warmup_steps=0", f"output_dir={tmp_path / 'base'}") == 0
    base = RunDir(tmp_path / "base").checkpoint(1) / "model"
    shape = ("model", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    recipe = [word for word in RECIPE if not word.startswith(shape)] + [*SGD, "model=pretrained"]
    recipe += [f"model.path={base}", "adapter=lora", "adapter.r=2", "max_steps=3"]
    with served(tmp_path, *AVERAGE, "diloco.sync_every=1", recipe=recipe) as server:
        finish(*[worker(server, name, recipe=recipe) for name in "ab"])
        found = global_weights(server, 3)
        received = server.client.status()["received"]
    recipe += [f"global_batch_size={2 * BATCH}", f"output_dir={tmp_path / 'whole'}"]
    assert forgather("train", "default", *recipe) == 0
    files = [RunDir(tmp_path / name) for name in ("whole", "server")]
    whole, kept = (load_file(run.checkpoint(3) / "model" / "adapter_model.safetensors") for run in files)
    prefix = "base_model.model."
    assert largest_difference(found, {name.removeprefix(prefix): tensor for name, tensor in whole.items()}) < 1e-6
    assert largest_difference(kept, whole) < 1e-6
    assert received < 3 * (base / "model.safetensors").stat().st_size, "six changes of the whole would be twice that"


def test_rows_of_any_length_count_though_nobody_states_the_longest(tmp_path: Path) -> None:
    """Beside a member that states more targets than the rows that it names have."""
    own = [word for word in RECIPE if not word.startswith(("data", "seq_len", "per_device", "eval"))]
    own += ["data._target_=users_parts.ragged", "per_device_train_batch_size=1"]
    with served(tmp_path, recipe=own) as server:
        honest = worker(server, "a", ALL, recipe=own)
        liar = FakeWorker(server.client, "z")
        liar.register(data=None, tokenizer=None)
        for number, targets in enumerate((2**53, 16 * BATCH * STEPS, 1)):
            liar.next(number - 1)
            liar.submit(liar.change(number), targets)
        finish(honest)
        until(lambda: server.is_at(ROUNDS))
        rejected = [dict(line["closed"]["rejected"]) for line in server.ledger()[1:]]
    assert [list(each) for each in rejected] == [["z"], ["z"], []]
    assert all("data.seq_len" in each["z"] for each in rejected[:2])


def test_a_worker_that_joins_later_begins_with_the_next_round(tmp_path: Path) -> None:
    with served(tmp_path, "diloco.compression=int8", "diloco.compression_down=int8", workers=1) as server:
        first = worker(server, "a", "max_steps=12")
        until(lambda: server.is_at(1))
        second = worker(server, "b", "max_steps=12")
        finish(first, second)
        weights = global_weights(server, 4)
    assert all(value.isfinite().all() for value in weights.values())
    counted = [[sent["worker"] for sent in line["closed"]["submissions"]] for line in server.ledger()[1:]]
    assert counted[0] == ["a"]
    assert counted[-1] == ["a", "b"]


def test_a_server_that_is_away_ends_a_worker_with_a_checkpoint_and_75(tmp_path: Path) -> None:
    patience = ("callbacks.diloco.timeout=1", "callbacks.diloco.max_sync_retries=1")
    with served(tmp_path, workers=1) as server:
        process = worker(server, "a", "max_steps=1000", *patience)
        until(lambda: server.is_at(2))
        server.process.kill()
        assert process.finish() == 75, process.output
    run = RunDir(tmp_path / "a")
    assert run.checkpoint_steps()
    assert json.loads(run.exit.read_text())["state"] == "stopped"
    assert f"127.0.0.1:{server.client.port}" in process.output


def test_a_worker_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as server, worker(server, "a", ALL) as first:
        first.read_until("waiting")
        for setting, named in (
            ("num_hidden_layers=1", "model"), ("callbacks.diloco.sync_every=7", "sync_every"), ("seed=7", "data")
        ):  # fmt: skip
            other = worker(server, named, ALL, setting)
            assert (other.finish(), named in other.output) == (2, True), other.output
