"""Tasks on runs of ours: the numbers of lm-eval's own ``hf`` model on the finalized directory, under every strategy."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import chats
import numpy as np
import own_tasks
import pytest
import tokenizers
import torch
import transformers
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from own_tasks import NAMES
from program import forgather
from ranks import run_ranks
from tokenizers import processors

from forgather_cli.cli.evaluate import config_to_evaluate
from forgather_cli.errors import DataError
from forgather_cli.strategies.single import SingleDevice
from forgather_cli.tasks import source as tasks_source
from forgather_cli.tasks.lm import StrategyLM
from forgather_cli.tasks.run import load_tasks

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRATEGIES = {
    "ddp": ["trainer=ddp", "nproc_per_node=2"],
    "fsdp2": ["trainer=fsdp2", "nproc_per_node=2"],
    "pipeline": ["trainer=pipeline", "nproc_per_node=2", "n_microbatches=2"],
}


class Made(NamedTuple):
    """A run of 64 positions, what finalize made of it, and tasks."""

    run: Path
    final: Path
    tasks: str


@pytest.fixture(scope="module", params=["no begin token", "<s>"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("tasks")
    tasks = own_tasks.write_tasks(root / "tasks")
    words = root / "words"
    if request.param == "<s>":
        chats.write_tokenizer(words, TEMPLATE, [*chats.SPECIAL[:2], "<s>", chats.SPECIAL[2]])
        tokenizer = tokenizers.Tokenizer.from_file(str(words / "tokenizer.json"))
        begin = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
            chat_template=TEMPLATE,
        ).save_pretrained(str(words))  # fmt: skip
    else:
        chats.write_tokenizer(words, TEMPLATE)
    run, final = root / "run", root / "final"
    settings = [
        "model=nano", "precision=fp32", "hidden_size=32", "seq_len=64", "global_batch_size=8", "device=cpu",
        "data=text",
        "learning_rate=1e-2", "warmup_steps=1", "max_steps=40", "callbacks=minimal", "eval_strategy=no",
    ]  # fmt: skip
    files = [f"data.files=[{tasks}/train.jsonl]", f"data.tokenizer={words}", f"output_dir={run}"]
    assert forgather("train", *settings, *files) == 0
    assert forgather("finalize", str(run), str(final)) == 0
    return Made(run, final, str(tasks))


def ours(of: Path, tasks: str, names: list[str], *words: str, shots: int = 0, chat: bool = False) -> Any:
    """(metrics, samples by task) of our command's function."""
    samples = Path(tasks).parent / f"samples-{'-'.join(words)}.jsonl"
    asked = {"names": names, "tasks_dir": tasks, "fewshot": shots, "limit": None, "apply_chat_template": chat}
    loaded, _ = config_to_evaluate(of, ["device=cpu", *words])
    report = tasks_source.evaluate_source(of, loaded.config, tasks={**asked, "samples": str(samples)})
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return report["metrics"], {name: [row for row in rows if row["task"] == name] for name in names}


def theirs(lm: Any, tasks: str, names: list[str], shots: int, chat: bool) -> Any:
    built = load_tasks(names, tasks, num_fewshot=shots)
    for task in built["tasks"].values():
        task.set_fewshot_seed(1234)  # lm-eval's default
    found = evaluate(lm, built, apply_chat_template=chat, fewshot_as_multiturn=chat, bootstrap_iters=0)
    values = found["results"].items()
    metrics = {f"tasks/{name}/{k.partition(',')[0]}": v for name, each in values for k, v in each.items() if "," in k}
    return {name: value for name, value in metrics.items() if not name.endswith("_stderr")}, found["samples"]


def assert_same(found: Any, reference: Any) -> None:
    """Arguments, log-likelihoods within 1e-4, flags, texts and scores."""
    (metrics, samples), (their_metrics, their_samples) = found, reference
    for name, rows in their_samples.items():
        for ours, theirs in zip(samples[name], json.loads(json.dumps(rows, default=str)), strict=True):
            assert ours["arguments"] == theirs["arguments"]
            assert_same_answers([each[0] for each in ours["resps"]], [each[0] for each in theirs["resps"]])
    assert {name: metrics[name] for name in their_metrics} == pytest.approx(their_metrics, rel=1e-4)


def assert_same_answers(found: list[Any], reference: list[Any]) -> None:
    for ours, theirs in zip(found, reference, strict=True):
        if isinstance(theirs, str):
            assert ours == theirs
        elif isinstance(theirs, float):
            assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-6)
        else:
            assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
            assert ours[1] == theirs[1]


@pytest.mark.parametrize("shots", [0, 3])
def test_a_run_has_the_numbers_of_hf_on_what_finalize_made_of_it(
    made: Made, shots: int, one_thread: None, capfd: pytest.CaptureFixture[str]
) -> None:
    hf = HFLM(str(made.final), device="cpu", batch_size=1, dtype="float32")
    for names, chat in ((NAMES[:3], False), (["mine_chat", "mine_begun"], True)):
        capfd.readouterr()
        found = ours(made.run, made.tasks, names, shots=shots, chat=chat)
        assert capfd.readouterr() == ("", "")  # of lm-eval's lines and bars nothing
        assert_same(found, theirs(hf, made.tasks, names, shots, chat))
    texts = {answer[0] for row in found[1]["mine_chat"] for answer in row["resps"]}
    assert len(texts) > 2  # it has learned something


def test_a_continuation_that_is_shifted_by_one_token_has_other_numbers(
    made: Made, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the comparison sees what is wrong by one place."""
    hf = HFLM(str(made.final), device="cpu", batch_size=1, dtype="float32")
    scores = StrategyLM._loglikelihood_tokens

    def shifted(lm: StrategyLM, requests: Any, **_: Any) -> Any:
        return scores(lm, [(text, [*context, *rest[:1]], [*rest[1:], rest[0]]) for text, context, rest in requests])

    monkeypatch.setattr(StrategyLM, "_loglikelihood_tokens", shifted)
    found = ours(made.run, made.tasks, NAMES[:1])
    with pytest.raises(AssertionError):
        assert_same(found, theirs(hf, made.tasks, NAMES[:1], 0, False))


def test_a_model_that_keeps_no_cache_has_the_same_numbers(
    made: Made, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of the user's own: every row is computed whole."""
    metrics, samples = ours(made.run, made.tasks, NAMES[:2])
    asked = []
    logits = SingleDevice.logits
    monkeypatch.setattr(
        SingleDevice, "logits",
        lambda self, inputs, *, cache=None, **words: asked.append(cache) or logits(self, inputs, **words),
    )  # fmt: skip
    assert_same(ours(made.run, made.tasks, NAMES[:2]), (metrics, samples))
    assert {*asked[1:]} == {None}  # after the first look


def on_a_rank(made: Made, words: list[str], names: list[str]) -> dict[str, float]:
    torch.set_num_threads(1)
    loaded, _ = config_to_evaluate(made.run, ["device=cpu", "per_device_eval_batch_size=3", *words])  # several batches
    asked = {"names": names, "tasks_dir": made.tasks, "fewshot": 2, "limit": None, "apply_chat_template": False}
    metrics: dict[str, float] = tasks_source.evaluate_source(made.run, loaded.config, tasks={**asked, "samples": None})[
        "metrics"
    ]
    return metrics


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_the_numbers_of_one_device(made: Made, strategy: str, one_thread: None) -> None:
    names = [*NAMES, "mine_drawn"]
    alone = on_a_rank(made, [], names)
    first, second = run_ranks(2, on_a_rank, made, STRATEGIES[strategy], names)
    assert first == pytest.approx(alone, rel=1e-5)
    assert second == first
    assert len(alone) == 12


def test_generators_are_left_alone_and_a_local_rank_does_not_matter(
    made: Made, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    states = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
    first = ours(made.run, made.tasks, ["mine_drawn", "mine_until"], shots=1)
    assert [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()] == states
    random.seed(5)
    torch.manual_seed(5)
    assert ours(made.run, made.tasks, ["mine_drawn", "mine_until"], shots=1) == first  # texts that are drawn, too


def test_a_setting_of_generation_that_is_not_known_is_refused(made: Made, tmp_path: Path) -> None:
    folder = own_tasks.write_tasks(tmp_path / "tasks")
    file = folder / "mine_until.yaml"
    for old, new, message in (
        ("do_sample: false", "penalty_alpha: 0.6", "task mine_until: generation_kwargs has penalty_alpha"),
        ("max_gen_toks: 12", "max_gen_toks: 64", "task mine_until: max_gen_toks=64 leaves no room in 64 tokens"),
    ):
        text = file.read_text()
        file.write_text(text.replace(old, new))
        with pytest.raises(DataError, match=message):
            ours(made.run, str(folder), ["mine_until"])
        file.write_text(text)
