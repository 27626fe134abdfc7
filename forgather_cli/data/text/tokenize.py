"""Text to the token cache: one token file and one file of document borders per split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from forgather_cli.data.cache import Meta, build_once, digest, find
from forgather_cli.data.text.corpus import Documents, Piece, Split, available_cores, cut_last, split_documents
from forgather_cli.data.text.encode import SPLITS, Encoded, Encoder, TokenFiles
from forgather_cli.data.text.read import Damage, Document
from forgather_cli.data.text.tokenizer import FileTokenizer, Tokenizer, train_bpe
from forgather_cli.data.text.tokenizer_workers import Crew
from forgather_cli.data.tokens import ArrayFile, Tokenized, Tokens, TokenSplit
from forgather_cli.errors import DataError

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in bytes of the source."""

_VERSION = 2  # of the files below
_WORTH_PROCESSES = 64 << 20  # bytes of text; less is done before processes have started
_MOST_PROCESSES = 16  # by themselves: each takes some 300 MB
_log = logging.getLogger(__name__)


def end_of(tokenizer: Tokenizer) -> int:
    """The token that follows each document. Raises DataError where a tokenizer names none."""
    if tokenizer.eos_token_id is None:
        raise DataError("data.tokenizer: names no end token; add eos_token to its tokenizer_config.json")
    return tokenizer.eos_token_id


def corpus_key(corpus: Documents, tokenizer_fingerprint: str, root: Path, *, read: bool = True) -> str | None:
    """Name of the cache directory; None if the content is not known yet and ``read`` is false."""
    content = corpus.fingerprint(root, read=read)
    return None if content is None else digest([_VERSION, content, tokenizer_fingerprint])


def bpe_directory(corpus: Documents, vocab_size: int, root: Path, *, read: bool = True) -> Path | None:
    """Where the BPE tokenizer of a corpus belongs; None if the content is not known yet and ``read`` is false."""
    content = corpus.fingerprint(root, read=read)
    return None if content is None else root / "tokenizers" / digest([_VERSION, content, vocab_size])


def trained_bpe(corpus: Documents, vocab_size: int, root: Path, progress: Progress | None) -> Tokenizer:
    """The BPE tokenizer of a corpus, trained on its training documents if it is not in the cache."""
    directory = bpe_directory(corpus, vocab_size, root)
    assert directory is not None

    def write(temporary: Path) -> Meta:
        documents = _reported(split_documents(corpus, Damage()), corpus.pieces(), progress)
        train_bpe((doc.text for split, doc in documents if split == "train"), vocab_size, temporary)
        return {"corpus": corpus.origin}

    build_once(root, "tokenizers", directory.name, write)
    return FileTokenizer(directory)


def tokenize_corpus(
    corpus: Documents, tokenizer: Tokenizer, root: Path, progress: Progress | None, *, processes: int | None = None
) -> Tokenized:
    """The tokens of a corpus, from the cache or made now. Raises DataError for a corpus without text.

    A build that was killed goes on where it was. ``processes`` encode at once; None: as many as there are cores, where
    there is enough to do. Their number changes no byte of the result.
    """
    key = corpus_key(corpus, tokenizer.fingerprint, root)
    assert key is not None

    def write(temporary: Path) -> Meta:
        return _write(temporary, corpus, tokenizer, progress, processes) | {"content": corpus.content(root)}

    directory, meta = build_once(root, "tokens", key, write, goes_on=True)
    evaluation = _open(directory, "eval", meta) if meta["eval"]["tokens"] else None
    return Tokenized(_open(directory, "train", meta), evaluation, key, meta)


def cached_corpus(corpus: Documents, tokenizer_fingerprint: str, root: Path) -> tuple[str, Meta] | None:
    """Key and meta data of a corpus that is in the cache already; reads no text and writes nothing."""
    key = corpus_key(corpus, tokenizer_fingerprint, root, read=False)
    meta = find(root, "tokens", key) if key else None
    return None if key is None or meta is None else (key, meta)


def _open(directory: Path, split: Split, meta: Meta) -> TokenSplit:
    counts = meta[split]
    tokens = ArrayFile(directory / f"{split}.bin", meta["dtype"], counts["tokens"])
    documents = ArrayFile(directory / f"{split}.documents.bin", "int64", counts["documents"] + 1)
    return TokenSplit(Tokens([tokens]), documents)


def _write(
    directory: Path, corpus: Documents, tokenizer: Tokenizer, progress: Progress | None, processes: int | None
) -> Meta:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    encoder = Encoder(corpus, tokenizer, end_of(tokenizer), dtype)
    pieces = corpus.pieces()
    files = TokenFiles(directory, digest([_VERSION, pieces]), dtype)
    try:
        _encode(encoder, pieces, files, directory, _Bar(pieces, files.journal.done, progress), processes)
        _hold_some_out(encoder, pieces, files)
    finally:
        files.close()
    journal = files.journal
    if not journal.tokens["train"]:
        raise _nothing_to_train(corpus, has_eval=journal.tokens["eval"] > 0)
    files.finish()
    damage = journal.damage.lines()
    for line in damage.values():
        _log.warning("%s", line)
    counts: Meta = {name: {"tokens": journal.tokens[name], "documents": journal.documents[name]} for name in SPLITS}
    return {"dtype": dtype, **counts, "origin": corpus.origin, **damage}


def _encode(
    encoder: Encoder,
    pieces: Sequence[Piece],
    files: TokenFiles,
    directory: Path,
    bar: _Bar,
    processes: int | None,
) -> None:
    """Encode the pieces that are not done, here or in processes."""

    def encode_here(piece: Piece) -> None:
        files.commit(encoder.encode(piece, files.outputs, bar.add, is_first=files.journal.last < 0))

    first = files.journal.done
    num = _num_processes(processes, pieces[first:])
    if num == 1:
        for piece in pieces[first:]:
            encode_here(piece)
        bar.end()
        return
    with Crew(num, encoder, pieces, directory) as crew:
        for result in crew.encode(first):
            if isinstance(result, int):
                bar.add(result)
                continue
            made, paths = result
            if made.took_as_later and files.journal.last < 0:  # nothing was in the pieces before
                for path in paths.values():
                    path.unlink()
                encode_here(pieces[files.journal.done])
            else:
                files.append(paths)
                files.commit(made)
    bar.end()


def _num_processes(asked: int | None, pieces: Sequence[Piece]) -> int:
    if asked is None:
        asked = min(available_cores(), _MOST_PROCESSES) if _num_bytes(pieces) >= _WORTH_PROCESSES else 1
    return max(1, min(asked, len(pieces)))


def _hold_some_out(encoder: Encoder, pieces: Sequence[Piece], files: TokenFiles) -> None:
    """Where a fraction is asked for and no document was held out, hold out the end of the last."""
    journal, corpus = files.journal, encoder.corpus
    if not corpus.eval_fraction or journal.documents["eval"] or journal.last < 0:
        return
    *_, last = corpus.read(pieces[journal.last], Damage())
    files.drop_last("train")
    made = Encoded()
    for split, document in cut_last(corpus, last, journal.chars, any_held_out=False):
        ids = encoder.tokenizer.encode_arrays([document.text])
        made.lengths[split].append(encoder.write(ids, files.outputs[split]))
    files.commit(made)


def _nothing_to_train(corpus: Documents, *, has_eval: bool) -> DataError:
    if has_eval and corpus.eval_fraction:
        return DataError(f"data.eval_fraction: {corpus.eval_fraction} leaves nothing to train on; lower it")
    return corpus.nothing()


def _num_bytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


class _Bar:
    """Tells ``progress`` of bytes that are done, now and then: a bar needs no more, and documents may be small."""

    def __init__(self, pieces: Sequence[Piece], done: int, progress: Progress | None) -> None:
        self._total, self._done = _num_bytes(pieces), _num_bytes(pieces[:done])
        self._progress = progress
        self._reported = 0

    def add(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        if self._progress is not None and self._done - self._reported >= self._total // 200:
            self._reported = self._done
            self._progress(self._done, self._total)

    def end(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total)


def _reported(
    documents: Iterable[tuple[Split, Document]], pieces: Sequence[Piece], progress: Progress | None
) -> Iterator[tuple[Split, Document]]:
    bar = _Bar(pieces, 0, progress)
    for split, document in documents:
        yield split, document
        bar.add(document.num_bytes)
    bar.end()
