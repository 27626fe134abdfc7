"""``data.add_tokens``: markers of a chat template that are no tokens become tokens that the model learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chats
import hf_models
import pytest
import torch
import transformers
import yaml
from chats import conversation, write_chats, write_tokenizer
from parity import LAYOUTS, Result, assert_near
from program import document, forgather
from safetensors.torch import load_file, save_file

from forgather_cli.config.decode import dump_tree
from forgather_cli.config.load import load_config
from forgather_cli.data.build import load_data
from forgather_cli.data.chat.markers import markers_of
from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.data.text.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from forgather_cli.errors import DataError
from forgather_cli.finalize.tokens import NewToken, add_to_tokenizer
from forgather_cli.inference.source import load_source
from forgather_cli.plan.run import make_plan

pytestmark = pytest.mark.usefixtures("one_thread")
START, END = "<|im_start|>", "<|im_end|>"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
POOR = ["<|endoftext|>"]  # what the tokenizer has of its own


def poor_model(directory: Path, spare: int = 0, **settings: Any) -> int:
    """A model directory whose template writes markers that its tokenizer lacks; returns how many tokens that has.
    ``spare``: rows of the embedding without a token."""
    tokens = len(write_tokenizer(directory, CHATML, POOR))
    chats.write_model(directory, "llama", tokens + spare, **settings)
    return tokens


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("add_tokens")
    write_chats(root / "chats.jsonl", 40)
    for name, settings in {"untied": {}, "tied": {"tie_word_embeddings": True, "num_hidden_layers": 4}}.items():
        poor_model(root / name, **settings)
    return root


def words(place: Path, name: str, model: str = "pretrained") -> list[str]:
    return [
        f"model={model}", f"model.path={place}/{name}", "data=instruct", f"data.files=[{place}/chats.jsonl]",
        f"data.cache_dir={place}/cache", "data.eval_fraction=0.3", "seq_len=96", "packing=pad",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """On one device."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: hf_models.train(LAYOUTS["single"], words(place, name), folder / name) for name in ("tied", "untied")}


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_new_rows_are_the_mean_of_the_old(name: str, place: Path, runs: dict[str, Result]) -> None:
    old = load_file(place / name / "model.safetensors")
    for tensor in [EMBEDDING] if name == "tied" else [EMBEDDING, HEAD]:
        rows, count = runs[name].begin[tensor], len(old[tensor])
        assert len(rows) == count + 2
        assert torch.equal(rows[:count], old[tensor])
        torch.testing.assert_close(rows[count:], old[tensor].mean(0).expand(2, -1), rtol=1e-6, atol=1e-7)
    assert (HEAD in runs[name].begin) is (name == "untied")


def test_each_marker_is_one_token_of_what_is_trained_and_of_the_checkpoint(
    place: Path, runs: dict[str, Result]
) -> None:
    model, known = hf_models.newest_model(runs["untied"].path), len(FileTokenizer(place / "untied").encode(START))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(model), FileTokenizer(model)
    tokens = FileTokenizer(place / "untied").vocab_size
    assert known > 1
    for tokenizer in (theirs, ours):
        assert [tokenizer.encode(mark) for mark in (START, END)] == [[tokens], [tokens + 1]]
    made = theirs.apply_chat_template(conversation(2), tokenize=False)
    assert theirs.encode(made) == ours.encode(made)
    trained = torch.cat(runs["untied"].samples).flatten()
    assert (trained == tokens).any()
    assert (trained == tokens + 1).any()
    assert tokens + 1 in json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    assert json.loads((model / "config.json").read_text())["vocab_size"] == tokens + 2


def test_a_finalized_model_has_the_same_ids_and_logits(runs: dict[str, Result], tmp_path: Path) -> None:
    final = tmp_path / "final"
    assert forgather("finalize", str(hf_models.newest_model(runs["tied"].path).parent), str(final)) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(final).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    text = tokenizer.apply_chat_template(conversation(1), tokenize=False)
    ids = torch.tensor([tokenizer.encode(text)])
    source = load_source(runs["tied"].path, device="cpu")
    assert source.tokenizer.encode(text) == ids[0].tolist()
    torch.testing.assert_close(source.model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
    assert source.tokenizer.encode(END)[0] in theirs.generation_config.eos_token_id
    assert "<|im_end|>" not in tokenizer.decode(ids[0], skip_special_tokens=True)


@pytest.mark.parametrize(("name", "layouts"), [("tied", ("1F1B 2", "single")), ("untied", ("fsdp2 2", "1F1B 2"))])
def test_every_strategy_begins_alike_and_goes_on_from_another(
    name: str, layouts: tuple[str, str], place: Path, runs: dict[str, Result], tmp_path: Path
) -> None:
    stop = ["+callbacks.probe.stop_after=2"]
    first = hf_models.train(LAYOUTS[layouts[0]], words(place, name), tmp_path, stop)
    for tensor, rows in runs[name].begin.items():
        assert torch.equal(first.begin[tensor], rows), tensor
    then = hf_models.train(LAYOUTS[layouts[1]], words(place, name), tmp_path, resume=True)
    assert_near([*first.losses, *then.losses], runs[name].losses, "loss")


def test_a_class_of_transformers_grows_alike(place: Path, runs: dict[str, Result], tmp_path: Path) -> None:
    found = hf_models.train(LAYOUTS["1F1B 2"], words(place, "tied", "transformers"), tmp_path)
    assert torch.equal(found.begin[EMBEDDING], runs["tied"].begin[EMBEDDING])
    assert_near(found.losses, runs["tied"].losses, "loss")


@pytest.mark.parametrize("kind", ["pretrained", "transformers"])
def test_spare_rows_are_taken_first_and_other_tensors_left_alone(kind: str, tmp_path: Path) -> None:
    """Of a padded vocabulary as large as another tensor has rows."""
    tokens = poor_model(tmp_path, spare=6)
    poor_model(tmp_path, spare=6, intermediate_size=tokens + 6, hidden_size=32)
    file = tmp_path / "model.safetensors"
    old = load_file(file)
    old[EMBEDDING][tokens:] = 100.0  # nothing that anybody has trained
    save_file(old, file, metadata={"format": "pt"})
    write_chats(tmp_path / "chats.jsonl", 40)
    begin = hf_models.train(LAYOUTS["single"], words(tmp_path, ".", kind), tmp_path / "run").begin
    for name, tensor in old.items():
        assert begin[name].shape == tensor.shape
        same = slice(tokens) if name in (EMBEDDING, HEAD) else slice(None)
        assert torch.equal(begin[name][same], tensor[same]), name
    mean = old[EMBEDDING][:tokens].mean(0).expand(2, -1)
    torch.testing.assert_close(begin[EMBEDDING][tokens : tokens + 2], mean, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def fresh(place: Path) -> list[str]:
    return [
        "model=nano", "hidden_size=32", "data=instruct", f"data.files=[{place}/chats.jsonl]",
        "data.chat_template=chatml", "data.eval_fraction=0.2", f"data.cache_dir={place}/cache", "seq_len=128",
        "device=cpu", "precision=fp32", "callbacks=minimal", "max_steps=2", "save_steps=1", "global_batch_size=4",
        "eval_strategy=no", "async_save=false",
    ]  # fmt: skip


def rows_of(run: Path) -> Any:
    return json.loads((hf_models.newest_model(run) / "config.json").read_text())["vocab_size"]


def test_fresh_weights_have_them_and_say_so(fresh: list[str], tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    assert forgather("train", *fresh, f"output_dir={run}") == 0
    [said] = [line for line in "".join(capfd.readouterr()).splitlines() if START in line]
    assert END in said
    model = hf_models.newest_model(run)
    assert rows_of(run) == make_plan(load_config(None, fresh).config).vocab_size == 259
    assert transformers.AutoTokenizer.from_pretrained(model).chat_template == CHATML
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == [256, 258]
    write_chats(tmp_path / "few.jsonl", 5)
    other = ["data=instruct", f"data.files=[{tmp_path}/few.jsonl]", "data.chat_template=chatml"]
    for given in ([], other):
        assert document(capfd, "eval", str(run), *given)["eval_targets"] > 0


def test_a_run_saved_without_the_setting_keeps_its_ids(fresh: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert forgather("train", *fresh, "data.add_tokens=false", f"output_dir={run}") == 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"].pop("add_tokens") is False
    (run / "config.yaml").write_text(dump_tree(config))
    assert forgather("resume", str(run), "max_steps=3") == 0
    assert rows_of(run) == 257
    assert forgather("resume", str(run), "max_steps=4", "data.add_tokens=auto") == 2, "other ids than it has learned"


def test_a_vocabulary_without_room_is_left_as_it_is_unless_told(fresh: list[str], tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    assert forgather("train", *fresh, "model.vocab_size=258", f"output_dir={run}") == 0
    assert "data.add_tokens=true" in capfd.readouterr().err
    assert len(FileTokenizer(hf_models.newest_model(run)).encode(END)) == len(END)
    told = [*fresh, "model.vocab_size=258", "data.add_tokens=true", f"output_dir={tmp_path}/told"]
    assert forgather("train", *told) != 0
    assert "model.vocab_size" in capfd.readouterr().err
    assert forgather("train", *fresh, "model.vocab_size=300", f"output_dir={tmp_path}/wide") == 0
    assert FileTokenizer(hf_models.newest_model(tmp_path / "wide")).encode(END) == [258]


NO_SYSTEM = "{# <|none|> #}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    ("turn", "markers"),
    [
        # Phi and Zephyr put them together
        ("{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}", "<|assistant|> <|end|> <|system|> <|user|>"),
        (NO_SYSTEM + "{{ '<start_of_turn>' ~ m.role ~ m.content ~ '<end_of_turn>' }}", "<end_of_turn> <start_of_turn>"),
        # what ends a turn, of any shape
        ("{{ m.role + ': ' + m.content + '</turn>' }}", "</turn>"),
        ("{{ m.role + ': ' + m.content + '\\n' }}", ""),
        ("{{ '<|turn>' + m.role + m.content + '<turn|>' }}", "<turn|> <|turn>"),
        ("{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}", "</s>"),
    ],
)
def test_markers_of_a_template(turn: str, markers: str) -> None:
    tokens = {"bos_token": "B", "eos_token": "</s>"}
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}" + turn + "{% endfor %}", tokens)
    assert sorted(markers_of(template)) == markers.split()
    assert sorted(markers_of(ChatTemplate(CHATML, tokens))) == [END, START]


def test_bytes_with_markers_are_those_that_are_saved(tmp_path: Path) -> None:
    own = ByteTokenizer(added=["<a>", "<a>b", "<\uff5cü\uff5c>"])
    own.save(tmp_path)
    saved = FileTokenizer(tmp_path)
    texts = ["x<a>by<|endoftext|><a>é", "<\uff5cü\uff5c>ü<a", "", "né<a><a>b"]
    spans = [[(1, 4), (10, 20)], [(2, 5)], [], [(1, 3), (5, 9)]]
    for ours, theirs in zip(own.encode_marked(texts, spans), saved.encode_marked(texts, spans), strict=True):
        assert ours[0].tolist() == theirs[0].tolist()
        assert ours[1].tolist() == theirs[1].tolist()
    ids = own.encode("".join(texts))
    assert own.decode(ids) == saved.decode(ids) == "".join(texts)
    assert own.decode(ids, skip_special_tokens=True) == saved.decode(ids, skip_special_tokens=True)
    assert own.bytes_of_tokens().tolist() == saved.bytes_of_tokens().tolist()  # type: ignore[union-attr]
    assert own.vocab_size == saved.vocab_size == 260
    assert len({ByteTokenizer().fingerprint, own.fingerprint, ByteTokenizer(added=["<a>"]).fingerprint}) == 3


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("adds", ["data", "finalize"])
def test_a_list_of_added_tokens_in_the_config_has_them_too(kind: str, adds: str, tmp_path: Path) -> None:
    """As Qwen's files have it."""
    source, made = tmp_path / "source", tmp_path / "made"
    write_tokenizer(source, None, POOR)
    path = source / "tokenizer_config.json"
    added = {"0": {"content": POOR[0], "special": True, "normalized": False, "lstrip": False, "rstrip": False}}
    told = {**json.loads(path.read_text()), "tokenizer_class": kind, "added_tokens_decoder": added}
    path.write_text(json.dumps(told))
    if adds == "data":
        load_tokenizer(str(source), added=[START, END]).save(made)
    else:
        load_tokenizer(str(source)).save(made)
        add_to_tokenizer(made, [NewToken(START, True, 1), NewToken(END, False, 2)])
    ours, theirs = FileTokenizer(made), transformers.AutoTokenizer.from_pretrained(made)
    assert type(theirs).__name__ in (kind, "TokenizersBackend")
    text = f"{START}user\nHi{END}"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert len(ours.encode(START)) == len(ours.encode(END)) == 1
    assert (END in theirs.decode(ours.encode(text), skip_special_tokens=True)) is (adds == "finalize")


def test_a_token_that_is_there_but_not_taken_whole_keeps_its_id_and_ids_with_gaps_are_refused(tmp_path: Path) -> None:
    """As ``</s>`` in the vocabulary of a model that no special token names."""
    write_tokenizer(tmp_path, None, POOR)
    path = tmp_path / "tokenizer.json"
    file = json.loads(path.read_text())
    size = file["model"]["vocab"]["</s>"] = len(file["model"]["vocab"])
    path.write_text(json.dumps(file))
    assert len(FileTokenizer(tmp_path).encode("</s>")) > 1
    tokenizer = load_tokenizer(str(tmp_path), added=["</s>", START])
    assert [tokenizer.encode("</s>"), tokenizer.encode(START)] == [[size], [size + 1]]
    assert (tokenizer.num_new, tokenizer.vocab_size) == (1, size + 2)
    file["model"]["vocab"]["</s>"] += 9
    path.write_text(json.dumps(file))
    with pytest.raises(DataError, match=r"data\.add_tokens: <\|im_start\|> .*set add_tokens=false"):
        load_tokenizer(str(tmp_path), added=[START])


def test_other_ids_have_a_cache_of_their_own(place: Path) -> None:
    options = [load_config(None, [*words(place, "tied"), f"data.add_tokens={given}"]).config.data for given in
               ("false", "true")]  # fmt: skip
    without, having = (load_data(option, seed=0) for option in options)
    assert without.fingerprint != having.fingerprint
    assert having.vocab_size == (without.vocab_size or 0) + 2
    assert having.description["train_tokens"] < without.description["train_tokens"]
