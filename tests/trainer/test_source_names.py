"""Names of the source documents: a script with all of them, under every strategy, and what each of them is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from ranks import run_ranks
from selection import some
from torch import Tensor

from forgather_cli import StateComponent, Trainer, TrainerCallback
from forgather_cli.callbacks import (
    InfoCallback,
    JsonLogger,
    PeakMemory,
    ProgressCallback,
    ResumableSummaryWriter,
    TBLogger,
    TextgenCallback,
    TrainerControlCallback,
)
from forgather_cli.checkpoint.load import Reader
from forgather_cli.control import registry
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir

BUILT_IN = {"model", "optimizer", "scheduler", "trainer", "data", "rng", "callbacks"}
IDS, MASK = torch.tensor([[258, 258, 5], [9, 20, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
"""Two prompts, padded on the left with what is no token of the model."""


class Walk:
    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Named(Trainer):
    """Has a component for each group of ranks that the base names, beside those of the base."""

    walks: dict[str, Walk]
    seen: dict[str, StateComponent]

    def get_state_components(self) -> list[StateComponent]:
        base = super().get_state_components()
        self.seen = {each.key: each for each in base}
        self.walks = {name: Walk() for name in self.get_process_groups()}
        return base + [StateComponent(n, each, "per_group", process_group=n) for n, each in self.walks.items()]


class Scores(TrainerCallback):
    """Step 2 is the best, and is left. Notes what a script finds while it trains."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["metrics"]["eval_score"] = {2: 1.0}.get(state.global_step, 0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = kwargs["trainer"]
        assert trainer.train_dataloader is kwargs["train_dataloader"]
        for walk in trainer.walks.values():
            walk.place += 1


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return dict(trainer.full_parameters())


def of_step(path: Path) -> dict[str, Tensor]:
    reader = Reader(path)
    return {name: reader.read(name) for name in reader.model_names()}


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def trainer_at(root: str, layout: str, *, callbacks: Any = (), **given: Any) -> Any:
    data = tiny.RandomTokens(64, vocab=256)
    trainer = {"trainer": {"type": layout, "n_microbatches": 2} if layout == "pipeline" else layout}
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
                "metric_for_best_model": "score", "greater_is_better": True, "deterministic": True,
                "per_device_train_batch_size": 4, "learning_rate": 1e-2,
                "processing_class": ByteTokenizer(), "construct_model_on": "device", "gc_threshold": 0.9,
                "fp8_dim_alignment": 16, "pp_stage_type": "loop", "is_multistage": False, "debug_model_init": True,
                "debug_model_params": True, "debug_split_model": layout == "pipeline"}  # fmt: skip
    return tiny.script(
        root, None, data, data, kind=Named, model_init=lambda: tiny.decoder(vocab_size=258), callbacks=callbacks,
        **{**trainer, **settings, **given},
    )  # fmt: skip


def script(root: str, layout: str) -> dict[str, Any]:
    """Made of the names, on each rank: train, save, load the best, write."""
    writer = ResumableSummaryWriter()
    written = transformers.GenerationConfig(
        max_new_tokens=3, do_sample=True, typical_p=0.9, pad_token_id=1, bos_token_id=1, use_cache=True,
        output_attentions=False, _from_model_config=True,
    )  # fmt: skip
    callbacks = [
        Scores(), TBLogger(summary_writer=writer), PeakMemory(summary_writer=writer), JsonLogger(experiment="first"),
        TextgenCallback(prompts=["ab"], generation_config=written, summary_writer=writer, eos_token_id=[256, 257]),
        TrainerControlCallback(job_id=f"named-{layout}"),
    ]  # fmt: skip
    trainer = trainer_at(f"{root}/{layout}", layout, callbacks=callbacks)
    assert (trainer.do_train, trainer.train_dataloader) == (True, None)
    assert BUILT_IN.intersection(each.key for each in trainer.get_state_components()) == {"model"}
    assert trainer.unwrapped_model() is trainer.model
    trainer.train()
    ranks, epoch = (1, 16) if layout == "single" else (2, 16 if layout == "pipeline" else 8)
    assert (trainer.state.num_processes, trainer.state.epoch_train_steps) == (ranks, epoch)
    assert trainer.checkpoint_manager is trainer.checkpoints
    assert trainer.checkpoint_manager.failures == []
    seen = {key: each for key, each in trainer.seen.items() if not key.startswith("callbacks.")}
    assert set(seen) == BUILT_IN
    assert seen["trainer"].object.state_dict()["global_step"] == 4
    assert all(
        isinstance(each.object.state_dict(), dict) and callable(each.object.load_state_dict) for each in seen.values()
    )
    moments = seen["optimizer"].object.state_dict()
    seen["optimizer"].object.load_state_dict(moments)

    last = weights(trainer)
    trainer.load_best_model()
    best = weights(trainer)
    trainer.load_checkpoint(RunDir(Path(root, layout)).checkpoint(4))
    assert not differ(weights(trainer), last)
    trainer.save_model(f"{root}/{layout}-saved")
    written_ids = trainer.pipeline_generate(IDS, attention_mask=MASK, max_new_tokens=5, do_sample=False, eos_token_id=7)
    text = trainer.pipeline_generate(IDS[1:], generation_config={"max_new_tokens": 2, "do_sample": False})

    again = trainer_at(f"{root}/{layout}-again", layout, callbacks=[Scores()])
    again.load_checkpoint(RunDir(Path(root, layout)).checkpoint(2))
    assert not differ(weights(again), best)
    assert again.train().global_step == 4
    filled = trainer_at(
        f"{root}/{layout}", layout, callbacks=[Scores()], construct_model_on="meta", resume_from_checkpoint=True,
        resume_components=["model", "dataset"],
    )  # fmt: skip
    assert not differ(weights(filled), last)
    return {
        "groups": {name: dist.get_process_group_ranks(group) for name, group in trainer.get_process_groups().items()},
        "best": differ(best, of_step(RunDir(Path(root, layout)).checkpoint(2))),
        "last": differ(last, best) != [],
        "resumed": (again.state.resumed_step, differ(weights(again), last)),
        "walks": {name: walk.place for name, walk in again.walks.items()},
        "written": (written_ids, text, trainer.generate([[5], [9, 20, 3]], max_new_tokens=5, do_sample=False)),
    }


GROUPS: dict[str, dict[str, list[int]]] = {
    "single": {}, "ddp": {"ddp_group": [0, 1]}, "fsdp2": {"ddp_group": [0, 1]}, "pipeline": {"pp_group": [0, 1]},
}  # fmt: skip


@pytest.mark.parametrize("layout", some(GROUPS, "fsdp2", "pipeline"))
def test_a_script_with_the_names_trains_saves_loads_and_writes(layout: str, tmp_path: Path) -> None:
    ranks = [script(str(tmp_path), layout)] if layout == "single" else run_ranks(2, script, str(tmp_path), layout)
    for found in ranks:
        assert found["groups"] == GROUPS[layout]
        assert (found["best"], found["last"]) == ([], True)
        assert found["resumed"] == (2, [])
        # of another run's checkpoint: a component of a group goes on where the group is the same
        assert found["walks"] == dict.fromkeys(GROUPS[layout], 4)
        ids, text, plain = found["written"]
        assert torch.equal(ids[:, :3], IDS)
        for row, whole, size in zip(ids[:, 3:].tolist(), plain, (1, 3), strict=True):
            new = whole[size:]
            new = new[: new.index(7)] if 7 in new else new
            assert row == new + [ByteTokenizer().pad_token_id] * (len(row) - len(new))
        assert text[0].tolist() == plain[1][:5]
        assert all(
            torch.equal(mine, first) for mine, first in zip(found["written"][:2], ranks[0]["written"][:2], strict=True)
        )
    assert {record["experiment"] for record in tiny.metrics(tmp_path / layout)} == {"first"}
    assert transformers.AutoConfig.from_pretrained(tmp_path / f"{layout}-saved").vocab_size == 258
    [file] = (tmp_path / layout / "tensorboard").iterdir()
    events = tiny.tensorboard(file.parent)
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4]
    assert [event.step for event in events.Tensors("samples/1/text_summary")] == [2, 4]


def test_the_loss_function_is_the_settings_or_the_script_s_own(tmp_path: Path) -> None:
    logits, labels = torch.randn(2, 5, 64, requires_grad=True), torch.randint(0, 64, (2, 5))
    labels[0, 2] = -100
    trainer = tiny.script(tmp_path, label_smoothing_factor=0.1)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(trainer.loss_fn(logits, labels), expected)
    [mine], [wanted] = (
        torch.autograd.grad(trainer.loss_fn(logits, labels), logits),
        torch.autograd.grad(expected, logits),
    )
    torch.testing.assert_close(mine, wanted)

    trainer.model.is_encoder_decoder = True
    del trainer.loss_fn
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(trainer.loss_fn(logits, labels), expected)

    def own(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.square().mean()

    assert tiny.script(tmp_path, loss_fn=own).loss_fn is own

    class Older(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loss_fn = own

    assert tiny.script(tmp_path, kind=Older).loss_fn is own


def test_default_callbacks_are_fresh_and_an_override_stands_in_their_place(tmp_path: Path) -> None:
    first, second = ({type(each): each for each in Trainer.default_callbacks()} for _ in range(2))
    trainer = tiny.script(tmp_path / "all", max_steps=1, disable_tqdm=False)
    trainer.train()
    assert first.keys() == {type(each) for each in trainer.callbacks.by_name.values()}
    assert not any(each is second[kind] for kind, each in first.items())
    assert not any(
        isinstance(each, ProgressCallback) for each in tiny.script(tmp_path / "no").callbacks.by_name.values()
    )

    class Fewer(Trainer):
        @classmethod
        def default_callbacks(cls) -> list[Any]:
            return [each for each in super().default_callbacks() if not isinstance(each, InfoCallback | JsonLogger)]

    fewer = tiny.script(tmp_path / "fewer", kind=Fewer, max_steps=1, callbacks=[TBLogger()])
    fewer.train()
    assert list(fewer.callbacks.by_name) == ["metrics", "progress", "tensorboard"]
    assert not (tmp_path / "fewer" / "metrics.jsonl").exists()
    saved = (tmp_path / "fewer" / "config.yaml").read_text()
    assert ("\n  progress:" in saved, "\n  info:" in saved) == (True, False)


def test_a_summary_writer_goes_on_where_the_run_does(tmp_path: Path) -> None:
    """Without the TensorBoard callback, in a directory of its own; the number of the run stands at each step."""
    folder = tmp_path / "board"
    for number, (steps, past) in enumerate(((6, None), (4, 2), (6, 4))):
        writer = ResumableSummaryWriter(folder)
        texts = TextgenCallback(prompts=["ab"], max_new_tokens=2, summary_writer=writer)
        adds = tiny.acts(on_step_end=lambda state, *_, **kw: writer.add_scalar("run", number, state.global_step))  # noqa: B023
        trainer = trainer_at(str(tmp_path / "run"), "single", max_steps=steps, callbacks=[Scores(), texts, adds])
        trainer.train(resume_from_checkpoint=past and str(trainer.run_dir.checkpoint(past)))
        writer.close()
    told = [(event.step, event.value) for event in tiny.tensorboard(folder).Scalars("run")]
    assert told == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert tiny.tensorboard(folder).Tensors("samples/1/text_summary")
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_job_s_name_may_be_said_by_its_callback_alone(tmp_path: Path) -> None:
    seen: list[str] = []
    found = tiny.acts(on_step_end=lambda state, *_, **kwargs: seen.append(registry.resolve("by-name").run_dir))
    tiny.script(tmp_path / "run", max_steps=1, callbacks=[TrainerControlCallback(job_id="by-name"), found]).train()
    assert seen == [str((tmp_path / "run").resolve())]
    with pytest.raises(
        ConfigError, match=r"^job_id: nothing reads it, TrainerControlCallback\.job_id stands in its place; "
    ):
        tiny.script(tmp_path, job_id="one", callbacks=[TrainerControlCallback(job_id="two")])
    for name in ("../up", "latest"):
        with pytest.raises(ConfigError, match=r"^job_id: .*; "):
            tiny.script(tmp_path, callbacks=[TrainerControlCallback(job_id=name)])


def test_the_best_model_is_not_loaded_where_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny.script(tmp_path)
    trainer.load_best_model()
    trainer.load_checkpoint(True)
    assert "no whole and healthy checkpoint has eval_loss" in caplog.text
    assert not list(tmp_path.iterdir()), "who does not train leaves no trace"


def groups(root: str) -> dict[str, list[int]]:
    trainer = {"type": "pipeline", "shard": 2, "n_microbatches": 2}
    found = tiny.script(root, model_init=tiny.decoder, trainer=trainer).get_process_groups()
    return {name: dist.get_process_group_ranks(group) for name, group in found.items()}


def test_a_pipeline_of_sharded_stages_has_both_groups(tmp_path: Path) -> None:
    expected = [
        {"pp_group": [rank % 2, rank % 2 + 2], "ddp_group": [rank // 2 * 2, rank // 2 * 2 + 1]} for rank in range(4)
    ]
    assert run_ranks(4, groups, str(tmp_path)) == [dict(sorted(each.items())) for each in expected]
