"""UL2: denoisers against span corruption written independently, packing, positions, and bad input."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import write_lines
from paired import lists, mixture, tokens
from ranks import run_ranks
from streams import in_order, steps_of

from forgather_cli.config.decode import dump_tree, load_tree
from forgather_cli.config.load import load_config, load_resumed
from forgather_cli.config.schema import DenoiserSettings, Seq2SeqSettings, Ul2Settings
from forgather_cli.data.build import load_data
from forgather_cli.data.cache import Cache
from forgather_cli.data.paired.denoise import row_lengths
from forgather_cli.data.paired.rows import Shape, batch_of_rows, best_fit_in_two
from forgather_cli.data.paired.sentinels import with_sentinels
from forgather_cli.data.paired.ul2 import CorpusWindows, DenoisedRows
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import DataError

pytestmark = pytest.mark.usefixtures("own_directory")


def t5(window: list[int], span: float, corruption: float, draws: np.random.Generator) -> tuple[list[int], list[int]]:
    """Span corruption by a mask and one token after the other, as T5's preprocessor does it."""
    masked = min(max(round(len(window) * corruption), 1), len(window) - 1)
    spans = min(max(round(masked / span), 1), masked, len(window) - masked)

    def segments(items: int) -> list[int]:
        first_of_segment = [False] * items
        for where in draws.choice(items - 1, spans - 1, replace=False) if spans > 1 else []:
            first_of_segment[where + 1] = True
        lengths = [0]
        for begins in first_of_segment:
            lengths.append(0) if begins else None
            lengths[-1] += 1
        return lengths

    noise, rest = segments(masked), segments(len(window) - masked)
    mask = [flag for kept, lost in zip(rest, noise, strict=True) for flag in [False] * kept + [True] * lost]
    source, target, sentinel = [], [], 99
    for number, (token, lost) in enumerate(zip(window, mask, strict=True)):
        if lost and not (number and mask[number - 1]):
            sentinel += 1
            source.append(sentinel)
            target.append(sentinel)
        (target if lost else source).append(token)
    return source, [*target, 99]


@pytest.mark.parametrize(("span", "corruption"), [(3.0, 0.15), (12.0, 0.5), (32.0, 0.15), (2.0, 0.5), (2.0, 0.9)])
def test_spans_are_those_of_t5(span: float, corruption: float) -> None:
    denoiser = DenoiserSettings(name="only", prefix="[R]", mean_span=span, corruption=corruption)
    for length in (2, 3, 7, 40):
        window, denoising = np.arange(length), mixture(denoisers=[denoiser])
        (example,) = denoising.examples(window, np.random.default_rng([5, length]))
        draws = np.random.default_rng([5, length])
        draws.random()  # which denoiser
        source, target = t5(window.tolist(), span, corruption, draws)
        assert lists(example) == ([90, *source], target)


def test_a_prefix_is_cut_between_a_fifth_and_four_fifths() -> None:
    only = mixture(denoisers=[DenoiserSettings(name="S", prefix="[S]")])
    shares = set()
    for number in range(50):
        (example,) = only.examples(np.arange(50), np.random.default_rng([number]))
        source, target = lists(example)
        assert source[0] == 90
        assert source[-1] == target[0] == 100
        assert target[-1] == 99
        assert source[1:-1] + target[1:-1] == list(range(50))
        shares.add(len(source) - 2)
        (shortest,) = only.examples(np.arange(2), np.random.default_rng([number]))
        assert lists(shortest) == ([90, 0, 100], [100, 1, 99])
    assert only.examples(np.arange(1), np.random.default_rng(0)) == []
    assert min(shares) in range(10, 14)
    assert max(shares) in range(37, 41)


@pytest.mark.parametrize("corruption", [0.15, 0.25, 0.5, 0.9])
def test_corruption_is_the_mean_share_after_a_prefix(corruption: float) -> None:
    settings: dict[str, Any] = {"max_encoder_length": 512, "max_decoder_length": 512, "max_seq_length": 400}
    only = mixture(denoisers=[DenoiserSettings(name="S", prefix="[S]", corruption=corruption)], **settings)
    shares = []
    for number in range(400):
        (example,) = only.examples(np.arange(400) % 90, np.random.default_rng([number]))
        shares.append((len(example.target) - 2) / 400)
    assert abs(np.mean(shares) - corruption) < 0.02
    assert np.std(shares) > 0.2 * min(corruption, 1 - corruption)
    assert min(shares) > 0
    assert max(shares) < 1
    for side in ("max_encoder_length", "max_decoder_length"):  # an example of any draw fits
        tight = mixture(denoisers=only.denoisers, **{**settings, side: 300})
        for number in range(100):
            for example in tight.examples(np.arange(400) % 90, np.random.default_rng([number])):
                assert len(example.source if "encoder" in side else example.target) <= 300


@pytest.mark.parametrize(
    ("name", "samples", "rules"),
    [
        ("r_x_s", "ff800592030e78586a8fa77aeb017c1b", "139a43b2133816f8164b01644ccd0c96"),
        ("ul2", "86e4b3d0b7d8e2dd8398862d35e372d3", "77a7efa66a5136bb57a825f02829cd1c"),
    ],
)
def test_examples_of_the_shipped_mixtures_stay_as_they_were(name: str, samples: str, rules: str) -> None:
    """They and what stands for their rules in a fingerprint, as 0.2 had them: its runs go on."""
    denoising = mixture(mixture=name)
    draws = (np.random.default_rng([7, number]) for number in range(200))
    found = [lists(example) for each in draws for example in denoising.examples(np.arange(80), each)]
    assert hashlib.sha256(str(found).encode()).hexdigest()[:32] == samples
    assert hashlib.sha256(denoising.rules.encode()).hexdigest()[:32] == rules


def test_other_shares_are_other_rules() -> None:
    def rules(**settings: Any) -> str:
        return mixture(denoisers=[DenoiserSettings(name="only", prefix="[S]", **settings)]).rules

    assert rules() == rules(corruption=0.5), "after a prefix it is half where nothing is said"
    assert rules(mean_span=3.0) == rules(mean_span=3.0, corruption=0.15)
    assert len({rules(corruption=share) for share in (0.15, 0.25, 0.5, 0.9)}) == 4


def test_denoisers_of_a_run_saved_before_mask_what_they_did(tmp_path: Path) -> None:
    denoisers = "data.denoisers=[{name: S, prefix: '[S]'}, {name: R, prefix: '[R]', mean_span: 3, corruption: 0.25}]"
    tree = load_config("qwen3_encdec_small", [denoisers, f"output_dir={tmp_path}"]).tree
    (tmp_path / "config.yaml").write_text(dump_tree(tree))
    assert load_tree(tmp_path / "config.yaml")["data"]["denoisers"] == tree["data"]["denoisers"]
    tree["data"]["denoisers"][0]["corruption"] = 0.15  # the default then, which nothing read
    del tree["model"]["replace_tokenizer"]
    (tmp_path / "config.yaml").write_text(dump_tree(tree))
    option = load_resumed(tmp_path / "config.yaml", []).config.data
    assert [each.share for each in option.denoisers] == [0.5, 0.25]


def test_every_token_of_a_window_is_in_one_example_that_fits() -> None:
    denoising = mixture(max_encoder_length=48, max_decoder_length=40)
    seen = set()
    for number in range(40):
        examples = denoising.examples(np.arange(80), np.random.default_rng([number]))
        kept = [t for each in examples for t in (*each.source, *each.target) if t < 90]
        assert sorted(kept) == list(range(80))
        assert all(len(each.source) <= 48 and len(each.target) <= 40 for each in examples)
        sizes = [sum(t < 90 for t in (*each.source, *each.target)) for each in examples]
        assert max(sizes) - min(sizes) <= 1, "pieces are equal"
        seen.add(examples[0].task)
    assert seen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("span", "length", "sentinels", "source", "target", "pieces"),
    [
        (3.0, 40, 2, 37, 9, 1), (3.0, 40, 2, 36, 9, 2), (3.0, 40, 2, 37, 8, 2), (3.0, 60, 3, 96, 64, 1),
        (3.0, 60, 2, 96, 64, 2), (3.0, 100, 2, 37, 9, 3), (None, 40, 1, 34, 34, 1), (None, 40, 1, 33, 34, 2),
        (None, 40, 1, 34, 33, 2),
    ],
)  # fmt: skip
def test_a_window_is_cut_into_the_fewest_pieces_that_fit(
    span: float | None, length: int, sentinels: int, source: int, target: int, pieces: int
) -> None:
    denoiser = DenoiserSettings(name="only", prefix="[S]", mean_span=span)
    limits = {"max_encoder_length": source, "max_decoder_length": target}
    made = mixture(sentinels, denoisers=[denoiser], **limits).examples(np.arange(length), np.random.default_rng(0))
    assert len(made) == pieces


def rows(is_eval: bool = False, packing: Any = "best_fit") -> DenoisedRows:
    windows = CorpusWindows(tokens(3000), 96, seed=3, is_eval=is_eval)
    shape = Shape(packing, 128, 96, 0, has_tasks=True)
    return DenoisedRows(windows, mixture(), shape, block=8, seed=3, is_eval=is_eval)


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(torch.equal(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in a)


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_a_position_goes_on_with_the_very_next_row(packing: str) -> None:
    whole = list(rows(packing=packing))
    for count in (1, 7, 16):
        assert count < len(whole)
        first, rest = rows(packing=packing), rows(packing=packing)
        head = list(islice(iter(first), count))
        rest.load_state_dict(first.state_dict())
        assert same([*head, *rest], whole)


def test_rows_padded_together_are_the_batch_of_their_examples() -> None:
    data = rows(packing="pad")
    block, _ = next(data._windows.blocks(0, 0, None, 8))
    examples = data.rows(block, 0)
    assert len({len(example.source) for [example] in examples}) > 1
    collated, wanted = data.collate(list(islice(data, len(examples)))), batch_of_rows(examples, data._shape)
    assert same([collated], [wanted])
    assert collated.keys() == wanted.keys()


def test_draws_follow_from_the_epoch_in_training_alone() -> None:
    for is_eval in (False, True):
        data = rows(is_eval)
        first = list(data)
        data.set_epoch(1)
        assert same(list(data), first) == is_eval
        data.set_epoch(0)
        assert same(list(data), first)


def test_shards_hold_every_window_once() -> None:
    def texts(data: DenoisedRows) -> list[int]:
        labels = [row["labels"][row["labels"] >= 0] for row in data]
        sources = [row["input_ids"][row["document_ids"] >= 0] for row in data]
        return sorted(int(t) for each in (*labels, *sources) for t in each if t < 90)

    assert texts(rows()) == sorted(texts(rows().shard(2, 0)) + texts(rows().shard(2, 1)))


def streamed(folder: str, **loader: Any) -> tuple[list[tuple[Any, Any]], int]:
    """On a rank: (rows, position) of each step of a streamed epoch, and how many rows come after the third position."""
    os.chdir(folder)
    whole = steps_of(load_data(STREAM, seed=3, num_sentinels=16), seed=3, **loader)
    rest = steps_of(load_data(STREAM, seed=3, num_sentinels=16), whole[2][1], seed=3, **loader)
    assert [rows for rows, _ in rest] == [rows for rows, _ in whole[3:]]
    return whole, len(rest)


STREAM = Ul2Settings(
    source="hf", data_files=["a.jsonl", "b.jsonl", "c.jsonl"], eval_files=["d.jsonl"], streaming=True,
    shuffle_buffer=7, max_seq_length=96, max_encoder_length=96, max_decoder_length=64, pack_encoder=128,
    pack_decoder=96, block_windows=5,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*set_vital")  # deprecated in torch 2.13, called by torchdata 0.11
def test_a_stream_goes_on_with_the_very_next_row(tmp_path: Path) -> None:
    texts = iter(range(120))
    for name in "abcd":
        rows = [{"text": f"Text {number} of {number * 7} words " * (1 + number % 5)} for number in islice(texts, 30)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    folder = str(tmp_path)
    alone, count = streamed(folder)
    assert count > 3
    (dispatched, _), (other, _) = run_ranks(2, streamed, folder)
    assert in_order([dispatched, other]) == in_order([alone]), "rank 0 reads what one rank would"
    _, count = streamed(folder, num_workers=2)
    assert count > 3
    for rank, (_, count) in enumerate(run_ranks(2, partial(streamed, dispatch=False), folder)):
        assert count > 1, rank


def test_rows_are_full_on_both_sides() -> None:
    denoising = mixture(100, max_seq_length=8192, max_encoder_length=4096, max_decoder_length=2048)
    encoder, decoder = row_lengths(Ul2Settings(), 100)
    window = np.zeros(8192, np.int64)
    examples = [each for n in range(512) for each in denoising.examples(window, np.random.default_rng([n]))]
    sizes = np.array([[len(each.source), len(each.target)] for each in examples])
    packed = best_fit_in_two(*sizes.T, encoder, decoder)
    assert sorted(number for row in packed for number in row) == list(range(len(examples)))
    assert all((sizes[row].sum(0) <= (encoder, decoder)).all() for row in packed)
    assert (encoder, decoder) == (8192, 5952)
    short = Ul2Settings(max_seq_length=96, max_encoder_length=96, max_decoder_length=64)
    assert row_lengths(replace(short, pack_encoder=10**9), 16) == (10**9, 722_089_216)
    assert row_lengths(replace(short, pack_encoder=5, pack_decoder=7), 16) == (5, 7)
    assert row_lengths(replace(short, packing="pad"), 16) == (96, 64)
    padding = 1 - sizes.sum(0) / (len(packed) * np.array([encoder, decoder]))
    assert padding.mean() < 0.075, padding


def test_sentinels_follow_on_the_tokens_and_are_not_added_twice(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "cache"))
    made = with_sentinels(load_tokenizer("bytes"), "bytes", 4, ["[R]", "[S]", "[R]"], cache)
    assert made.encode("[S]a<extra_id_0>b<extra_id_3>") == [262, 97, 257, 98, 260]
    assert made.decode([97, 257], skip_special_tokens=True) == "a"
    made.save(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=r"data\.tokenizer: .* has <extra_id_0> already"):
        with_sentinels(load_tokenizer(str(tmp_path / "tokenizer")), str(tmp_path / "tokenizer"), 4, [], cache)


def test_pairs_become_rows_that_hold_them_all() -> None:
    Path("pairs.jsonl").write_text("".join(f'{{"q": "ask {n}", "a": "{"yes " * (n % 5)}ok"}}\n' for n in range(40)))
    words: dict[str, Any] = {"files": ["pairs.jsonl"], "cache_dir": "cache", "input_key": "q", "target_key": "a",
                             "max_encoder_length": 24, "max_decoder_length": 40}  # fmt: skip
    for packing in ("best_fit", "pad"):
        data = load_data(Seq2SeqSettings(**words, packing=packing, eval_fraction=0.1), seed=0, num_sentinels=2)
        batches = [split.__getitems__(range(len(split))) for split in (data.train, data.eval)]
        text = "".join(data.tokenizer.decode(b["labels"][b["labels"] >= 0].tolist()) for b in batches)
        assert sorted(text.split("<|endoftext|>")[:-1]) == sorted("yes " * (n % 5) + "ok" for n in range(40))
        for batch in batches:  # what the decoder reads is what it predicts, one to the right
            decoded, labels = batch["decoder_input_ids"], batch["labels"]
            follows = (labels[:, :-1] >= 0) & (decoded[:, 1:] != data.tokenizer.pad_token_id)
            assert torch.equal(decoded[:, 1:][follows], labels[:, :-1][follows])
