"""A run becomes a model directory that transformers loads, equal to its source, or nothing at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import finalized
import pytest
import torch
from chats import write_chats
from finalized import logits, model_directory, refused, theirs, weights
from program import SMALL, document, forgather
from ranks import run_ranks
from saving import damage, flip, full_disk
from tiny import decoder

from forgather_cli import __version__
from forgather_cli.checkpoint.load import Reader, best_valid
from forgather_cli.checkpoint.tensors import write_model_directory
from forgather_cli.config.schema import Target
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import ProofError
from forgather_cli.finalize import prove
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.finalize.prove import compare_result, measure_source
from forgather_cli.finalize.run import finalize
from forgather_cli.finalize.sample import choose_sample
from forgather_cli.inference.source import load_source, locate
from forgather_cli.models.pretrained import write_model_files
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("own_directory")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NEW = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finalized.train(tmp_path_factory.mktemp("finalize") / "run")


@pytest.fixture(scope="module")
def finished(run: Path) -> Path:
    """The run, finalized; not to be changed."""
    finalize(run, run.parent / "finished", FinalizeOptions())
    return run.parent / "finished"


def reference(source: Path) -> torch.Tensor:
    return logits(load_source(source, device="cpu").model)


def test_from_a_checkpoint_of_two_ranks(tmp_path: Path) -> None:
    source = tmp_path / "run"
    run_ranks(2, finalized.train, source, "trainer=pipeline", "n_microbatches=2", "max_steps=1")
    report = finalize(source, tmp_path / "model", FinalizeOptions())
    assert report["source"]["strategy"] == "pipeline"
    torch.testing.assert_close(logits(theirs(tmp_path / "model")), reference(source), rtol=1e-5, atol=1e-5)


def test_a_run_becomes_a_model_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    report = document(capsys, "finalize", str(run), "out/model")
    assert report == json.loads(Path("out/model/finalize_report.json").read_text())
    proof = report["proof"]
    assert proof["sample"] == "the run's evaluation split"
    assert proof["loaded_through"].startswith("transformers")
    assert proof["max_logit_difference"] <= 1e-4 == proof["bound"]
    assert proof["perplexity_result"] == pytest.approx(proof["perplexity_source"], rel=1e-5)
    assert (report["source"]["step"], report["source"]["run"]) == (6, str(run))
    model = theirs("out/model")
    torch.testing.assert_close(logits(model), reference(run), rtol=1e-5, atol=1e-5)
    assert model.generation_config.eos_token_id == 256
    assert AutoTokenizer.from_pretrained("out/model").encode("def é") == list("def é".encode())
    card = Path("out/model/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert report["files"]["model.safetensors"]["sha256"] in card
    assert f"Made with Forgather {__version__}." in card
    assert sorted(path.name for path in Path("out").iterdir()) == ["model"]


def test_the_best_one_in_a_dry_run_and_without_it_where_it_is_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run, "run")
    best = best_valid(RunDir(Path("run")))
    losses = {step: Reader(RunDir(run).checkpoint(step)).manifest.metrics["eval_loss"] for step in (2, 4, 6)}
    for step in sorted(losses, key=lambda step: losses[step])[:2]:
        told = document(capsys, "finalize", "run", "model", "--best", "--dry-run")
        assert (told["source"]["step"], told["model"]["dtype"]) == (step, "fp32")
        damage(best.path / "model/model.safetensors", flip(-1))
    assert f"{best.path}: is damaged: model/model.safetensors has other content" in caplog.text
    assert not Path("model").exists()


def test_the_mean_of_the_last_checkpoints_in_bf16(run: Path) -> None:
    told: list[str] = []
    report = finalize(run, Path("model"), FinalizeOptions(average=5, dtype="bf16"), told.append)
    assert "keeps 3 healthy checkpoints (save_total_limit), 5 were asked for" in told[0]
    members = [weights(RunDir(run).checkpoint(step) / "model") for step in (2, 4, 6)]
    for name, tensor in weights(Path("model")).items():
        mean = torch.stack([member[name] for member in members]).mean(0)
        assert torch.equal(tensor, mean.bfloat16()), name
    assert report["proof"]["compared_with"] == "the source with its weights rounded to bf16"
    assert report["proof"]["perplexity_source"] != report["proof"]["perplexity_result"]
    assert theirs(Path("model"), dtype="auto").dtype == torch.bfloat16
    assert json.loads(Path("model/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_and_a_chat_template(tied: bool) -> None:
    from transformers import AutoTokenizer

    source = model_directory(Path("source"), tie_word_embeddings=tied)
    Path("tokens.txt").write_text("\n".join(NEW) + '\n{"token": "plain", "special": false}\n')
    Path("chat.jinja").write_text(CHATML)
    options = FinalizeOptions(add_tokens=Path("tokens.txt"), chat_template=Path("chat.jinja"))
    report = finalize(source, Path("model"), options)
    assert [token["id"] for token in report["added_tokens"]] == [257, 258, 259]
    assert [token["id"] for token in report["stop_tokens"]] == [256, 258]
    model, tokenizer = theirs(Path("model")), AutoTokenizer.from_pretrained("model")
    assert tokenizer.encode("a<|im_start|>plain<|im_end|>") == [97, 257, 259, 258]
    assert tokenizer.decode([97, 257, 259], skip_special_tokens=True) == "aplain"
    assert model.generation_config.eos_token_id == [256, 258]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"
    assert logits(model).shape[-1] == 260
    torch.testing.assert_close(logits(model)[..., :257], reference(source), rtol=1e-5, atol=1e-5)
    rows = model.get_input_embeddings().weight
    average = rows[:257].mean(0)
    assert (rows[257:] - average).norm(dim=1).max() < 0.1 * rows[:257].norm(dim=1).mean()
    assert not torch.equal(rows[257], rows[258])
    assert (model.get_output_embeddings().weight.data_ptr() == rows.data_ptr()) == tied


def test_another_architecture() -> None:
    """A class that only transformers has, tied by default, with its own names."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=256)
    GPT2LMHeadModel(shape).save_pretrained("source")
    ByteTokenizer().save(Path("source"))
    Path("tokens.txt").write_text("<|im_end|>")
    report = finalize(Path("source"), Path("model"), FinalizeOptions(add_tokens=Path("tokens.txt")))
    assert report["model"]["vocab_size"] == 258
    found, expected = (logits(theirs(Path(name)))[..., :257] for name in ("model", "source"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_template_that_refuses_a_plain_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    source = model_directory(Path("source"))
    Path("strict.jinja").write_text("{{ raise_exception('only tools') }}")
    message = refused(capsys, "source", "new", "--chat-template", "strict.jinja")
    assert "--chat-template: strict.jinja: the chat template refuses these messages (only tools)" in message
    shutil.copyfile("strict.jinja", source / "chat_template.jinja")
    told: list[str] = []
    finalize(source, Path("new"), FinalizeOptions(), told.append)
    assert any("where an answer ends is not known" in line for line in told)


def test_a_finalized_model_knows_what_it_was_made_from(finished: Path) -> None:
    report = finalize(finished, Path("second"), FinalizeOptions(text=Path(__file__)))
    assert report["source"]["made_from"]["step"] == 6
    assert report["proof"]["sample"] == __file__
    assert weights(Path("second")).keys() == weights(finished).keys()


def test_a_sharded_bf16_source_keeps_its_dtype_and_its_chat_template() -> None:
    model = decoder(vocab_size=257).bfloat16()
    source = Path("source")
    source.mkdir()
    write_model_directory(source, dict(model.state_dict()), max_bytes=40_000)
    write_model_files(model, ByteTokenizer(), source)
    (source / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", "<|endoftext|>"))
    assert len(list(source.glob("*.safetensors"))) > 1
    report = finalize(source, Path("model"), FinalizeOptions())
    assert [token["id"] for token in report["stop_tokens"]] == [256]  # where the template's answers end
    assert Path("model/chat_template.jinja").is_file()
    assert report["model"]["dtype"] == "bf16"
    assert report["proof"]["compared_with"] == "the source"
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights(Path("model")).items())


def test_a_result_that_is_another_model_is_no_proof(run: Path, finished: Path) -> None:
    shutil.copytree(finished, "model")
    found = locate(run)
    sample = choose_sample(None, None, load_source(run, device="cpu").tokenizer, 64)
    expected = measure_source(found, sample, 257, None)
    changed = weights(Path("model"))
    changed["model.layers.1.mlp.down_proj.weight"][0, 0] += 0.5
    write_model_directory(Path("model"), changed)
    with pytest.raises(ProofError, match=r"a logit differs by .* from the source .* the bound is 0.0001"):
        compare_result(Path("model"), expected, sample, FinalizeOptions())
    proof = compare_result(Path("model"), expected, sample, FinalizeOptions(max_divergence=10.0))
    assert proof["max_logit_difference"] > 1e-4
    changed["model.norm.weight"][0] = float("nan")
    write_model_directory(Path("model"), changed)
    with pytest.raises(ProofError, match="a logit differs by nan"):
        compare_result(Path("model"), expected, sample, FinalizeOptions())


def test_the_perplexity_is_that_of_plain_cross_entropy(run: Path) -> None:
    source = load_source(run, device="cpu")
    sample = choose_sample(Path(__file__), None, source.tokenizer, 64)
    measured = measure_source(locate(run), sample, 257, None).exact
    losses = []
    for ids, _ in sample.sequences:
        scores = logits(source.model, ids)[0, :-1]
        losses += [-scores.log_softmax(-1)[i, int(token)] for i, token in enumerate(ids[0, 1:])]
    assert measured.loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert measured.num_targets == len(losses)


def test_documents_of_a_row_are_apart_as_they_were_trained_so_that_the_perplexity_is_evals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_chats(Path("chats.jsonl"), 24)
    write_chats(Path("held_out.jsonl"), 6, first=100)
    words = [word for word in SMALL if not word.startswith(("data=", "num_", "seq_len"))]
    data = [
        "data=instruct",
        "data.files=[chats.jsonl]",
        "data.eval_files=[held_out.jsonl]",
        "data.chat_template=chatml",
    ]
    words += [*data, "tokenizer=bytes", "seq_len=256", "packing=best_fit", "max_steps=2", "output_dir=chats"]
    assert forgather("train", *words) == 0
    capsys.readouterr()
    wanted = document(capsys, "eval", "chats", "device=cpu")["eval_perplexity"]
    assert forgather("finalize", "chats", "chats-model") == 0
    proof = json.loads(Path("chats-model/finalize_report.json").read_text())["proof"]
    assert proof["perplexity_source"] == pytest.approx(wanted, rel=1e-5)


def test_without_transformers_our_own_reader_loads_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove.importlib.util, "find_spec", lambda name: None)  # as if it were not installed
    report = finalize(run, Path("model"), FinalizeOptions())
    assert report["proof"]["loaded_through"].startswith("Forgather's own reader")
    assert report["proof"]["max_logit_difference"] == 0.0


def test_bad_options(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there").mkdir()
    words = str(run)
    assert "there: exists already, and is not replaced" in refused(capsys, words, "there")
    assert "no such directory" in refused(capsys, "nowhere", "new")
    assert "--dtype: must be fp32, bf16 or fp16, got 'fp8'" in refused(capsys, words, "new", "--dtype", "fp8")
    assert "--quantize: must be one of int8-weight-only" in refused(capsys, words, "new", "--quantize", "int2")
    assert "--best: excludes --average" in refused(capsys, words, "new", "--best", "--average", "2")
    assert "--average: must be 2 or more, got 1; leave it out for" in refused(capsys, words, "new", "--average", "1")
    assert "--max-divergence: must be above 0" in refused(capsys, words, "new", "--max-divergence", "0")
    checkpoint = str(RunDir(run).checkpoint(6))
    message = refused(capsys, checkpoint, "new", "--best")
    assert f"is not a run's directory; leave --best out, or give {run}\n" in message
    for option, content in (("text", "plain text"), ("add-tokens", "tokens, one a line"), ("chat-template", "a Jinja")):
        message = refused(capsys, words, "deep/new", f"--{option}", "gone")
        assert f"--{option}: gone: cannot be read (No such file or directory); give a file of {content}" in message


MALFORMED: dict[str | bytes, str] = {
    "": "names no token",
    "<a>\n<b>\n<a>\n": "tokens:3: '<a>' is in line 1 already",
    "<a>\n\n<|endoftext|>\n": "tokens:3: '<|endoftext|>' is a token already (256)",
    "<a>\n <b>\n": "tokens:2: blanks around the token ' <b>'",
    '<a>\n{"token": 3}\n': "tokens:2: must be a token or",
    '{"token": "<a>", "specail": true}': "tokens:1: unknown key 'specail'",
    '{"token": "<a>", "special": 1}': "tokens:1: special must be true or false, got 1",
    '["<a>",\n "<b>"': "tokens:2: not JSON",
    '["<a>", 7]': "tokens:2: must be a token or",
    b"\xff\xfe": "tokens: is text in UTF-16",
}


def test_malformed_token_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in MALFORMED.items():
        Path("tokens").write_bytes(content if isinstance(content, bytes) else content.encode())
        assert message in refused(capsys, str(run), "new", "--add-tokens", "tokens")
    Path("tokens").write_text("[INST]\n[/INST]\n")  # is no JSON
    report = document(capsys, "finalize", str(run), "new", "--add-tokens", "tokens", "--dry-run")
    assert [token["token"] for token in report["added_tokens"]] == ["[INST]", "[/INST]"]


def test_damaged_sources(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RunDir(run).checkpoint(6), "step-00000006")
    damage(Path("step-00000006/model/model.safetensors"), flip(-1))
    message = refused(capsys, "step-00000006", "new")
    assert "is damaged: model/model.safetensors has other content than was written (SHA-256 differs); name" in message
    assert message.endswith("; name another checkpoint, RUN/checkpoints/step-...\n")
    source = model_directory(Path("source"))
    damage(source / "model.safetensors", lambda content: content[: len(content) // 2])
    assert "is not a safetensors file" in refused(capsys, "source", "new")


def test_a_full_disk_in_the_middle(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_disk(100_000):
        message = refused(capsys, str(run), "deep/er/new")
    assert re.search(r"cannot be written \(File too large\).*nothing was left behind", message, re.S)


def test_beyond_the_bound_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that knows a text by heart forgets some of it in four bits."""
    text = "The river had risen in the night, and by morning the lower fields lay under water."
    Path("text").write_text(text)
    memorized = finalized.memorize(decoder(vocab_size=257), text)
    write_model_directory(model_directory(Path("source")), dict(memorized.state_dict()))
    words = ["--quantize", "int8-dynamic-act-int4-weight", "--text", "text", "--max-divergence", "1.0001"]
    message = refused(capsys, "source", "new", *words, code=1)
    assert "the perplexity is 1." in message
    assert "the bound is 1.0001; nothing was written" in message


@pytest.mark.parametrize(("ratio", "shown"), [(1.0004, "1.0004"), (1 + 2**-52, "1.0000000000000002"), (2.5, "2.5")])
def test_the_ratio_is_told_so_that_it_is_above_the_bound(ratio: float, shown: str) -> None:
    proof = {
        "bound_on": "perplexity_ratio", "bound": 1.0, "perplexity_ratio": ratio, "perplexity_source": 190.57,
        "perplexity_result": 190.57 * ratio, "tokens": 2048, "sample": "text", "compared_with": "the source",
    }  # fmt: skip
    with pytest.raises(ProofError, match=rf"perplexity is {re.escape(shown)} times .*, the bound is 1; nothing"):
        prove._judge(proof)


def test_numbers_that_fp16_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    source = model_directory(Path("source"))
    changed = weights(source)
    changed["model.norm.weight"][3] = 1e6
    write_model_directory(source, changed)
    message = refused(capsys, "source", "new", "--dtype", "fp16")
    assert "--dtype: model.norm.weight holds numbers that fp16 cannot" in message


def test_a_model_of_the_users_own_class_is_not_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    finalized.train(Path("own"), "max_steps=1", model=Target("finalized.Bigrams", {}))
    assert "has no config.json, since the model is a class of your own" in refused(capsys, "own", "new")
