"""TextgenCallback: what it writes and when, and that training does not notice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from tiny import decoder
from torch import Tensor, nn

from forgather_cli.callbacks.base import CallbackList, NoWriter, TrainerControl, TrainerState
from forgather_cli.callbacks.console import printable
from forgather_cli.callbacks.textgen import TextgenCallback
from forgather_cli.config.schema import GenerationConfig, RunSettings, TextgenSettings
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.models.generate import generate
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.from_python import ScriptJob
from forgather_cli.trainer.step_sync import StepSync

EOS = 256


class Speaker:
    """A strategy that says the same words to every prompt, and records what it was asked."""

    def __init__(self, ids: list[int], noise: float = 0.0) -> None:
        self.device = torch.device("cpu")
        self.parts: list[nn.Module] = [nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1)).train()]
        self.parts[0][1].eval()
        self.ids, self.noise = ids, noise
        self.calls: list[dict[str, Tensor]] = []
        self.modes: set[bool] = set()

    def logits(self, batch: dict[str, Tensor], *, last_only: bool = False, cache: Any = None) -> Tensor:
        self.modes.add(self.parts[0].training)
        self.calls.append(batch)
        logits = torch.full((len(batch["input_ids"]), 1, EOS + 3), -50.0)
        logits[:, 0, :] *= 1 - self.noise
        wanted = self.ids[len(self.calls) - 1] if len(self.calls) <= len(self.ids) else EOS
        logits[:, 0, wanted] = 50.0 * (1 - self.noise)
        return logits


def trainer_of(strategy: Any, group: Any, tokenizer: Any = None) -> Any:
    sync = StepSync(TrainerControl(), ScriptJob())
    save = getattr(tokenizer, "save", lambda directory: None)
    run = SimpleNamespace(strategy=strategy, seed=42, cpu_group=group, sync=sync, write_model_files=save)
    return SimpleNamespace(strategy=strategy, run=run, tensorboard=NoWriter(), callbacks=CallbackList())


def event(
    callback: TextgenCallback, name: str, strategy: Any, tokenizer: Any, *, step: int = 100, **state: Any
) -> None:
    callbacks = CallbackList()
    callbacks.add(callback, "textgen")
    given = {"processing_class": tokenizer, "trainer": trainer_of(strategy, None, tokenizer)}
    callbacks.emit(name, RunSettings(), TrainerState(global_step=step, **state), TrainerControl(), **given)


def made(path: Path, prompts: Any = ("de",), writer: Any = None, **settings: Any) -> TextgenCallback:
    values = {"prompts": list(prompts), "max_new_tokens": 8, **settings}
    return TextgenCallback(TextgenSettings(**values), RunDir(path), summary_writer=writer)


def byte_ids(text: str) -> list[int]:
    return [*text.encode(), EOS]


def test_a_sample_goes_to_console_file_and_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts: list[Any] = []
    callback = made(tmp_path, ["de", "Zoë = "], SimpleNamespace(add_text=lambda *entry: texts.append(entry)))
    event(callback, "on_evaluate", Speaker(byte_ids("f ü\n x")), ByteTokenizer())
    samples = "=== step 100 ===\n--- 1 ---\ndef ü\n x\n\n--- 2 ---\nZoë = f ü\n x\n\n"
    assert (tmp_path / "samples.txt").read_text(encoding="utf-8") == samples
    assert texts == [("samples/1", "    def ü\n     x", 100), ("samples/2", "    Zoë = f ü\n     x", 100)]
    out = capsys.readouterr().out
    assert "sample 1 at step 100:\n    def ü\n     x\n" in out
    written = Speaker(byte_ids("\nend" * 30))
    event(made(tmp_path, ["word " * 60], max_new_tokens=200), "on_evaluate", written, ByteTokenizer())
    out = capsys.readouterr().out
    assert "    " + "word " * 60 + "\n" + "    end\n" * 30 in out


def test_prompts_are_padded_on_the_left_and_stop_early(tmp_path: Path) -> None:
    speaker = Speaker(byte_ids("hi"))
    event(made(tmp_path, ["a", "bcd", ""]), "on_evaluate", speaker, ByteTokenizer())
    first = speaker.calls[0]
    assert first["input_ids"].tolist() == [[EOS, EOS, 97], [98, 99, 100], [EOS, EOS, EOS]]
    assert first["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1], [0, 0, 1]]
    assert len(speaker.calls) == 3  # h, i, end: not max_new_tokens
    without_ends = SimpleNamespace(encode=lambda text: [], eos_token_id=None, pad_token_id=None)
    with pytest.raises(SetupError, match="an empty prompt needs a tokenizer with a bos or eos token"):
        event(made(tmp_path, [""]), "on_train_begin", Speaker([]), without_ends)


def test_cadence(tmp_path: Path) -> None:
    at_evaluation, every_50 = Speaker(byte_ids("x")), Speaker(byte_ids("x"))
    for step in (25, 50, 100):
        event(made(tmp_path), "on_step_end", at_evaluation, ByteTokenizer(), step=step)
        event(made(tmp_path, generation_steps=50), "on_step_end", every_50, ByteTokenizer(), step=step)
    assert at_evaluation.calls == []
    event(made(tmp_path, generation_steps=50), "on_evaluate", every_50, ByteTokenizer())
    assert (tmp_path / "samples.txt").read_text().count("=== step 50 ===") == 1
    assert (tmp_path / "samples.txt").read_text().count("=== step") == 2


def test_other_ranks_generate_and_write_nothing_and_modules_are_in_eval_mode_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker = Speaker(byte_ids("x"))
    event(made(tmp_path), "on_evaluate", speaker, ByteTokenizer(), is_world_process_zero=False)
    assert speaker.modes == {False}
    assert [module.training for module in speaker.parts[0].modules()] == [True, True, False]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_sampling_is_a_function_of_seed_and_step_and_leaves_training_s_generator_alone(tmp_path: Path) -> None:
    texts, file = [], tmp_path / "samples.txt"
    for seed, step in ((1, 100), (2, 100), (2, 200)):
        torch.manual_seed(seed)
        speaker = Speaker([], noise=0.99)
        before = torch.get_rng_state()
        callback = made(tmp_path, do_sample=True, top_k=0, temperature=5.0)
        event(callback, "on_evaluate", speaker, ByteTokenizer(), step=step)
        assert torch.equal(torch.get_rng_state(), before)
        texts.append(file.read_text().split("\n", 1)[1])
        file.unlink()
    assert texts[0] == texts[1] != texts[2]


def decoding(model: nn.Module) -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"),
        parts=[model],
        logits=lambda batch, last_only, cache: model(**batch, last_only=last_only, cache=cache),
    )


def test_with_the_decoder_and_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(64)}
    fast = Fast(WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="w0")  # no end, no padding token
    strategy = decoding(decoder())
    callback = made(tmp_path, ["w3", "w1 w2 w5"], do_sample=False)
    event(callback, "on_train_begin", strategy, tokenizer)
    event(callback, "on_evaluate", strategy, tokenizer)
    lines = (tmp_path / "samples.txt").read_text().splitlines()
    assert lines[2].startswith("w3")
    assert len(lines[5].removeprefix("w1 w2 w5").split("w")) == 9  # 8 new words


def steps_in(path: Path) -> list[int]:
    return [int(line.split()[2]) for line in (path / "samples.txt").read_text().splitlines() if line[:3] == "==="]


def test_a_resume_cuts_the_samples_of_later_steps_and_what_a_crash_left_half_written(tmp_path: Path) -> None:
    strategy, tokenizer = Speaker(byte_ids("x\n=== step 9 ===\n")), ByteTokenizer()
    for step in (100, 200, 300):
        strategy.calls.clear()
        event(made(tmp_path, max_new_tokens=30), "on_evaluate", strategy, tokenizer, step=step)
    file = tmp_path / "samples.txt"
    assert steps_in(tmp_path) == [100, 200, 300], "what the model writes is not taken for a record"
    whole = file.read_bytes()
    for step, writes in ((300, True), (250, False)):
        event(made(tmp_path), "on_train_begin", strategy, tokenizer, resumed_step=step, is_world_process_zero=writes)
        assert file.read_bytes() == whole
    event(made(tmp_path), "on_train_begin", strategy, tokenizer, resumed_step=250)
    assert file.read_bytes() == whole[: whole.index(b"=== step 300")]
    file.write_bytes(whole[: whole.index(b"=== step 200") + 20])
    event(made(tmp_path), "on_train_begin", strategy, tokenizer, resumed_step=200)
    assert file.read_bytes() == whole[: whole.index(b"=== step 200")]
    assert [path.name for path in tmp_path.iterdir()] == ["samples.txt"]
    callback = made(tmp_path)
    event(callback, "on_train_begin", strategy, tokenizer)
    assert steps_in(tmp_path) == [], "a run that begins anew"
    event(callback, "on_evaluate", strategy, tokenizer, step=0)
    event(callback, "on_train_begin", strategy, tokenizer)
    assert steps_in(tmp_path) == [0], "an evaluation by this process before it trains"


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_sample_ends_before_a_stop_text(tmp_path: Path, num_beams: int) -> None:
    speaker = Speaker(byte_ids("one two three"))
    config = GenerationConfig(stop=["o t", "never"], num_beams=num_beams, do_sample=False, max_new_tokens=50)
    event(made(tmp_path, max_new_tokens=3, generation_config=config), "on_evaluate", speaker, ByteTokenizer())
    assert (tmp_path / "samples.txt").read_text().splitlines()[2] == "deone tw"
    assert len(speaker.calls) == len("one two t") or num_beams > 1


def test_end_and_padding_are_the_tokenizers_unless_they_are_said(tmp_path: Path) -> None:
    speaker = Speaker(byte_ids("abcd"))
    event(made(tmp_path, ["x", "yz"], eos_token_id=ord("c"), pad_token_id=7), "on_evaluate", speaker, ByteTokenizer())
    assert (tmp_path / "samples.txt").read_text().splitlines()[2::3] == ["xab", "yzab"]
    assert speaker.calls[0]["input_ids"].tolist() == [[7, ord("x")], [*b"yz"]]
    assert len(speaker.calls) == 3
    several = GenerationConfig(eos_token_id=[ord("d"), ord("b")])
    speaker = Speaker(byte_ids("abcd"))
    event(made(tmp_path / "several", generation_config=several), "on_evaluate", speaker, ByteTokenizer())
    assert "\ndea\n" in (tmp_path / "several" / "samples.txt").read_text()


def test_a_generation_config_is_a_table_or_the_object_of_transformers() -> None:
    given = {"top_p": 0.5, "typical_p": 0.3, "max_new_tokens": 5, "do_sample": True, "eos_token_id": [3, 4]}
    first, second = (
        TextgenCallback(generation_config=each).sampling for each in (transformers.GenerationConfig(**given), given)
    )
    assert first == second
    assert {name: getattr(first, name) for name in given} == given
    assert (first.top_k, first.temperature) == (20, 0.7), "the callback's"
    with pytest.raises(ConfigError, match=r"TextgenCallback\.generation_config\.penalty_alpha: unknown setting"):
        TextgenCallback(generation_config=transformers.GenerationConfig(penalty_alpha=0.6))
    with pytest.raises(ConfigError, match=r"TextgenCallback\.generation_config: "):
        TextgenCallback(generation_config="beams")


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_is_a_turn_of_a_tokenizer_with_a_template_and_ends_with_the_answer(
    tmp_path: Path, raw: bool, num_beams: int
) -> None:
    tokenizer = ByteTokenizer(CHATML, ("<|im_start|>", "<|im_end|>"))
    speaker = Speaker(tokenizer.encode("It is.<|im_end|>and more"))
    config = GenerationConfig(num_beams=num_beams, do_sample=False, max_new_tokens=12)
    event(made(tmp_path, ["Hi"], raw=raw, generation_config=config), "on_evaluate", speaker, tokenizer)
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text = (tmp_path / "samples.txt").read_text().partition(" ---\n")[2].strip()
    assert text == ("HiIt is.<|im_end|>and m" if raw else f"{turn}It is.")
    assert speaker.calls[0]["input_ids"][0].tolist() == tokenizer.encode("Hi" if raw else turn)
    assert len(speaker.calls) == (12 if raw else len("It is.") + 1) or num_beams > 1


def test_samples_are_written_by_the_same_table_as_forgather_generate(tmp_path: Path) -> None:
    strategy = decoding(decoder(vocab_size=258, initializer_range=0.3).eval())
    config = GenerationConfig(num_beams=3, do_sample=False, no_repeat_ngram_size=2, min_new_tokens=5)
    settings = TextgenSettings(prompts=["de"], max_new_tokens=9, generation_config=config)
    event(TextgenCallback(settings, RunDir(tmp_path)), "on_evaluate", strategy, ByteTokenizer())
    sampling = settings.sampling()
    assert (sampling.repetition_penalty, sampling.max_new_tokens, sampling.num_beams) == (1.15, 9, 3)
    ids = generate(strategy.logits, torch.tensor([[*b"de"]]), eos_token_id=EOS, pad_token_id=EOS, **sampling.choices)
    text = printable(ByteTokenizer().decode([token for token in ids[0, 2:].tolist() if token != EOS]))
    assert (tmp_path / "samples.txt").read_text().startswith(f"=== step 100 ===\n--- 1 ---\nde{text}\n")


@pytest.mark.parametrize("shown_by", ["the progress display", "nothing else"])
def test_on_a_terminal_a_bar_stands_while_samples_are_written_and_they_are_literal_text(
    tmp_path: Path, shown_by: str
) -> None:
    from test_progress import on_terminal, shown_lines

    alone = shown_by == "nothing else"
    code = f"""
from test_textgen import *
from forgather_cli.terminal import bars
bars.Bar.__init__.__kwdefaults__["after"] = 0.0  # see conftest.py
class Slow(Speaker):
    def logits(self, *given, **options):
        time.sleep(0.21)
        return super().logits(*given, **options)
progress = ProgressCallback()
if {not alone}:
    progress.on_train_begin(None, TrainerState(max_steps=9), None)
settings = TextgenSettings(prompts=["de"], max_new_tokens=9)
callback = TextgenCallback(settings, RunDir(Path({str(tmp_path)!r})), show_bar={None if alone else "progress.show_bar"})
event(callback, "on_evaluate", Slow(byte_ids("[/b]\\x1b[2J")), ByteTokenizer())
progress.on_train_end(None, TrainerState(), None)
"""
    output = on_terminal(80, code)
    bars = [line for line in shown_lines(output) if line.startswith("samples")]
    assert any("3/9" in line for line in bars)
    assert any("4/9" in line for line in bars)
    after = shown_lines(output[output.index("sample 1 at step 100") :])
    assert not any(line.startswith("samples") for line in after)
    sample = [line for line in after if not line.startswith("train ")]
    assert sample[:2] == ["sample 1 at step 100", "  │ de[/b]\\x1b[2J"]
    assert "\n" + sample[1].removeprefix("  │ ") in (tmp_path / "samples.txt").read_text()
    assert "\x1b[2J" not in output


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text("- 'def f(x):'\n- |\n  two\n  lines\n- 'é'\n", encoding="utf-8")
    assert TextgenSettings(prompts=str(path)).texts() == ["def f(x):", "two\nlines\n", "é"]


def said_on_a_rank(path: Path, num_beams: int) -> int:
    """Rank 1's model would end at once, as weights may that part under post-local SGD."""
    import torch.distributed as dist

    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    strategy = Speaker([65, 66, EOS] if rank == 0 else [EOS])
    trainer = trainer_of(strategy, group)
    state = TrainerState(global_step=1, is_world_process_zero=rank == 0)
    callback = made(path, generation_config=GenerationConfig(num_beams=num_beams))
    callback.on_evaluate(RunSettings(), state, TrainerControl(), processing_class=ByteTokenizer(), trainer=trainer)
    return len(strategy.calls)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_ranks_whose_logits_differ_go_on_with_the_same_tokens_and_end_together(tmp_path: Path, num_beams: int) -> None:
    calls, others = run_ranks(2, said_on_a_rank, tmp_path, num_beams)
    assert calls == others
    assert num_beams > 1 or calls == 3
    assert "deAB\n" in (tmp_path / "samples.txt").read_text()
