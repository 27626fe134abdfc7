"""Text to the token cache: one token file and one file of document borders per split."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from forgather_cli.data.cache import Meta, Meter, Progress, build_once, digest, find
from forgather_cli.data.text.corpus import Documents, Piece, available_cores, cut_last, split_documents
from forgather_cli.data.text.encode import Encoded, Encoder, TokenFiles
from forgather_cli.data.text.read import Damage
from forgather_cli.data.text.tokenizer import FileTokenizer, Tokenizer, end_of, train_bpe
from forgather_cli.data.text.tokenizer_workers import TokenizerWorkers
from forgather_cli.data.tokens import SPLITS, Tokenized, cached_split, dtype_of
from forgather_cli.errors import DataError

_VERSION = 2  # of the files below
_WORTH_PROCESSES = 64 << 20  # bytes of text; less is done before processes have started
_MOST_PROCESSES = 16  # unless more are asked for: each takes some 300 MB
_log = logging.getLogger(__name__)


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
        meter = Meter(progress, _num_bytes(corpus.pieces()))

        def texts() -> Iterator[str]:
            for split, document in split_documents(corpus, Damage()):
                if split == "train":
                    yield document.text
                meter.add(document.num_bytes)
            meter.end()

        train_bpe(texts(), vocab_size, temporary)
        return {"corpus": corpus.origin}

    build_once(root, "tokenizers", directory.name, write)
    return FileTokenizer(directory)


def tokenize_corpus(
    corpus: Documents, tokenizer: Tokenizer, root: Path, progress: Progress | None, *, processes: int | None = None
) -> Tokenized:
    """The tokens of a corpus, from the cache or made now. Raises DataError for a corpus without text.

    A build that was killed is resumed. ``processes`` encode at once; None: as many as there are cores, where
    there is enough to do. Their number changes no byte of the result.
    """
    key = corpus_key(corpus, tokenizer.fingerprint, root)
    assert key is not None

    def write(temporary: Path) -> Meta:
        return _write(temporary, corpus, tokenizer, progress, processes) | {"content": corpus.content(root)}

    directory, meta = build_once(root, "tokens", key, write, goes_on=True)
    evaluation = cached_split(directory, "eval", meta) if meta["eval"]["tokens"] else None
    return Tokenized(cached_split(directory, "train", meta), evaluation, key, meta)


def cached_corpus(corpus: Documents, tokenizer_fingerprint: str, root: Path) -> tuple[str, Meta] | None:
    """Key and meta data of a corpus that is in the cache already; reads no text and writes nothing."""
    key = corpus_key(corpus, tokenizer_fingerprint, root, read=False)
    meta = find(root, "tokens", key) if key else None
    return None if key is None or meta is None else (key, meta)


def _write(
    directory: Path, corpus: Documents, tokenizer: Tokenizer, progress: Progress | None, processes: int | None
) -> Meta:
    """Tokenize a corpus into ``directory``, which may hold what a killed build has done of it."""
    dtype = dtype_of(tokenizer.vocab_size)
    encoder = Encoder(corpus, tokenizer, end_of(tokenizer), dtype)
    pieces = corpus.pieces()
    files = TokenFiles(directory, digest([_VERSION, pieces]), dtype)
    journal = files.journal
    try:
        meter = Meter(progress, _num_bytes(pieces), _num_bytes(pieces[: journal.done]))
        _encode(encoder, pieces, files, directory, meter, processes)
        meter.end()
        if corpus.eval_fraction and not journal.documents["eval"] and journal.last >= 0:
            # a fraction is asked for and no document was held out: hold out the end of the last
            *_, last = corpus.read(pieces[journal.last], Damage())
            files.drop_last("train")
            made = Encoded()
            for split, document in cut_last(corpus, last, journal.chars, any_held_out=False):
                ids = tokenizer.encode_arrays([document.text])
                made.lengths[split].append(encoder.write(ids, files.outputs[split]))
            files.commit(made)
    finally:
        files.close()
    if not journal.tokens["train"]:
        if journal.tokens["eval"] and corpus.eval_fraction:
            raise DataError(f"data.eval_fraction: {corpus.eval_fraction} leaves nothing to train on; lower it")
        raise corpus.nothing()
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
    meter: Meter,
    processes: int | None,
) -> None:
    """Encode the pieces that are not done, here or in processes."""

    def encode_here(piece: Piece) -> None:
        files.commit(encoder.encode(piece, files.outputs, meter.add, is_first=files.journal.last < 0))

    first = files.journal.done
    if processes is None:
        enough = _num_bytes(pieces[first:]) >= _WORTH_PROCESSES
        processes = min(available_cores(), _MOST_PROCESSES) if enough else 1
    processes = min(processes, len(pieces) - first)
    if processes <= 1:
        for piece in pieces[first:]:
            encode_here(piece)
        return
    with TokenizerWorkers(processes, encoder, pieces, directory) as workers:
        for result in workers.encode(first):
            if isinstance(result, int):
                meter.add(result)
                continue
            made, paths = result
            if made.assumed_later and files.journal.last < 0:  # no piece before had a document: encode it as the first
                for path in paths.values():
                    path.unlink()
                encode_here(pieces[files.journal.done])
            else:
                files.append(paths)
                files.commit(made)


def _num_bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)
