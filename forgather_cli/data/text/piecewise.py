"""The ids of byte-level tokenizers with most of the ``tokenizers`` library's work left out: on megabytes of text
with blanks between words two to seven times as fast as 0.20 to 0.23, on texts below 60 kB and scripts without blanks
no faster.

Such a tokenizer cuts a text into words, by a regular expression, and encodes each word by itself. Here numpy cuts, as
the expression does, and asks the library for the ids of each word once; which characters are letters, digits and white
space is asked of the library too. What it gives is the library's own wherever the cuts are the same.

Newer encoders are faster: tokenizers 1.0.0rc3 gives the same ids at 89 to 106 MB/s of one core, this 6 to 17. When
transformers allows 1.0 (5.24 asks for less than 0.24), its ``encode_batch`` takes the place of these 420 lines.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.text.library import document_of, replaced

if TYPE_CHECKING:
    import tokenizers

Bools = NDArray[np.bool_]
_LETTER, _DIGIT, _SPACE, _OTHER, _END, _UNKNOWN, _FOREIGN = range(7)
"""Classes of characters. _END stands between texts; texts with what is _FOREIGN are left to the library."""
_SEPARATOR = "\udfff"  # no text that can be encoded has it
_LONG_S = 0x17F  # which a pattern that ignores case takes for an s
_AT_ONCE = 1 << 18  # characters; the arrays of more leave the processor's cache
_LONGEST = 16  # bytes of a word that the table holds
_SLOTS = 1 << 18  # of the table
_MOST_WORDS = 1 << 17  # that are remembered: some 20 MB
_MOST_IDS = 1 << 21  # of them
_MOST_CHARS = 1 << 22  # of a text; a longer one, which has no lines, would need much memory
_MIX = tuple(np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))

# Split patterns -> the digits that stand together at most, 0: any number, with a blank before them as letters.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3, QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
PATTERNS = {GPT_2: 0, LLAMA_3: 3, QWEN_2: 1}

HARD = (
    "", " ", "  ", "\n", " \n", "x\n\n  y", "tail   ", "tail \n", "\u0149\u01c4 e\u0301 naïve Straße ﬁ",
    "don't WE'LL I'm 'sit ''s 's's 'tis'Re 'LLama 'x' it's", "1 12 123 1234 12345678 a1b22c333 ½²Ⅷ٣४५६७ 3.14 1,000",
    "(a) ((b)) ,c .d\n;\r\n}\n\n  \n\treturn\t\tx  \r\r\n end",
    "\u00a0a\u2003b\u2028c\u2029\u0085d\u3000e\x1c\x0b\x0cf \u200bg\ufeffh\x00i",
    "日本語のテキスト、漢字かな。한국어 ไทย हिन्दी", "👩‍👩‍👧‍👦 🇩🇪",
    "a" * 300 + "=" * 300 + " " * 300 + "\n" * 300 + "7" * 301,
)  # fmt: skip
"""Texts at which rules that differ would show."""


def byte_letters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_LETTERS = {byte: letter for letter, byte in byte_letters().items()}


class NotPiecewiseError(Exception):
    """Why a tokenizer's texts are left to the library."""


class _TooManyWordsError(Exception):
    """Texts have more words than are remembered."""


class PiecewiseEncoder:
    """Encodes texts word by word as ``tokenizer`` does. Raises NotPiecewiseError for one whose rules are not known.

    May be sent to another process, where it begins to remember words anew.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = tokenizer
        self._digits = PATTERNS[_pattern(document_of(tokenizer.pre_tokenizer))]
        self._is_nfc = _is_nfc(document_of(tokenizer.normalizer))
        if getattr(tokenizer.model, "dropout", None):
            raise NotPiecewiseError("its merges are dropped at random (dropout)")
        self._words = Tokenizer(tokenizer.model)
        """Encodes words, as nothing cuts them."""
        self._split, self._special, self._odd = _added_tokens(tokenizer, is_nfc=self._is_nfc)
        self._classes = np.full(0x110000, _UNKNOWN, np.uint8)
        self._classes[0xD800:0xE000] = _FOREIGN
        self._classes[ord(_SEPARATOR)] = _END
        if self._digits:
            self._classes[_LONG_S] = _FOREIGN
        self._learn(np.arange(128, dtype=np.uint32))
        self._ascii = np.append(self._classes[:128], np.full(128, _END, np.uint8))
        self._forget()

    def __reduce__(self) -> Any:
        return PiecewiseEncoder, (self._tokenizer,)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any] | None]:
        """The ids of texts; None for one that is left to the library."""
        groups = [self._divided(text) for text in texts]
        segments = [each for group in groups if group is not None for each in group[::2]]
        arrays: list[NDArray[Any] | None] = []
        start = size = 0
        for stop, segment in enumerate(segments, 1):
            size += len(segment) + 1
            if size >= _AT_ONCE or stop == len(segments):
                try:
                    arrays += self._encode(segments[start:stop])
                except _TooManyWordsError:
                    arrays += [None] * (stop - start)
                start, size = stop, 0
        found: list[NDArray[Any] | None] = []
        in_turn = iter(arrays)
        for group in groups:
            parts = [] if group is None else [next(in_turn) for _ in group[::2]]
            whole = [part for part in parts if part is not None]
            if group is None or len(whole) < len(parts):
                found.append(None)
                continue
            for at, token in enumerate(group[1::2]):
                whole.insert(2 * at + 1, np.array([self._special[token]], np.uint32))
            found.append(whole[0] if len(whole) == 1 else np.concatenate(whole))
        return found

    def _divided(self, text: str) -> list[str] | None:
        """Text and added tokens by turns; None for what is not divided here as the library does it."""
        if len(text) > _MOST_CHARS or (self._odd is not None and self._odd.search(text)):
            return None
        if not text.isascii():
            codes = _codes(text)
            classes = self._classes[codes]
            if (classes == _UNKNOWN).any():
                self._learn(np.unique(codes[classes == _UNKNOWN]))
                classes = self._classes[codes]
            if classes.max() >= _END or (self._is_nfc and not unicodedata.is_normalized("NFC", text)):
                return None
        return [text] if self._split is None else self._split.split(text)

    def _learn(self, codes: NDArray[np.uint32]) -> None:
        """Ask the library for the classes of characters."""
        codes = codes[self._classes[codes] == _UNKNOWN]
        text = codes.astype("<u4").tobytes().decode("utf-32-le")
        classes = np.full(len(codes), _OTHER, np.uint8)
        for name, pattern in ((_LETTER, r"\p{L}"), (_DIGIT, r"\p{N}"), (_SPACE, r"\s")):
            # to U+E000, of private use, which is in none of them
            found = _codes(replaced(text, pattern, "\ue000"))
            classes[(found == 0xE000) & (codes != 0xE000)] = name
        if self._is_nfc:  # what is newer than Python's tables may be composed by the library's
            unassigned = [unicodedata.category(each) == "Cn" for each in text]
            classes[np.array(unassigned, np.bool_)] = _FOREIGN
        self._classes[codes] = classes

    def _encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The ids of texts without added tokens, together: most are short, and a call of numpy takes a microsecond."""
        if all(map(str.isascii, texts)):
            data = b"\xff".join([text.encode() for text in texts]) + b"\xff"
            codes: NDArray[Any] = np.frombuffer(data, np.uint8)
            classes = self._ascii[codes]
        else:
            text = _SEPARATOR.join(texts) + _SEPARATOR
            data, codes = text.encode("utf-8", "surrogatepass"), _codes(text)
            classes = self._classes[codes]
        cut = _cuts_of_gpt_2 if not self._digits else _cuts_of_llama_3
        begins = cut(codes, classes, self._digits)
        starts = np.flatnonzero(begins)
        is_end = classes[starts] == _END
        if len(data) != len(codes):  # characters to bytes
            sizes = 1 + (codes > 0x7F) + (codes > 0x7FF).astype(np.int64) + (codes > 0xFFFF)
            starts = (np.cumsum(sizes) - sizes)[starts]
        words = self._numbers(data, starts, is_end)
        counts = self._counts[words]
        ends = np.cumsum(counts)
        places = np.repeat(self._firsts[words] - (ends - counts), counts)
        places += np.arange(len(places))
        ids = self._ids[places]
        borders = [0, *ends[is_end].tolist()]
        return [ids[start:stop] for start, stop in itertools.pairwise(borders)]

    # ------------------------------------------------------------------------------------------------ words -> numbers

    def _forget(self) -> None:
        self._number_of: dict[bytes, int] = {}
        # of each word, the first of which is none: its bytes, how many these are, its ids
        self._low, self._high = np.zeros((2, _MOST_WORDS), np.uint64)
        self._sizes, self._counts, self._firsts = np.zeros((3, _MOST_WORDS), np.int64)
        self._ids, self._num_ids, self._num_words = np.zeros(1 << 16, np.uint32), 0, 1
        self._slots = np.zeros(_SLOTS, np.int32)
        """Numbers of words, at one of two places that their bytes say."""

    def _numbers(self, data: bytes, starts: NDArray[np.int64], is_end: Bools) -> NDArray[np.int64]:
        """The number of each word of ``data``, 0 for the ends of texts."""
        padded = data + bytes(_LONGEST)
        sizes = np.diff(starts, append=len(data))
        eight = np.ndarray(len(data) + 8, "<u8", padded, strides=(1,))  # the 8 bytes from each one on
        low = eight[starts] & _MASKS[np.minimum(sizes, 8)]
        high = eight[starts + 8 * (sizes > 8)] & _MASKS[np.clip(sizes - 8, 0, 8)]
        first, second = self._places(low, high, sizes)
        numbers = self._slots[first].astype(np.int64)
        missing = np.flatnonzero(~self._is_word(numbers, low, high, sizes))
        numbers[missing] = again = self._slots[second[missing]]
        missing = missing[~self._is_word(again, low[missing], high[missing], sizes[missing])]
        numbers[is_end] = 0
        missing = missing[~is_end[missing]]
        if not len(missing):
            return numbers
        begins = starts[missing].tolist()
        texts = [data[a : a + n] for a, n in zip(begins, sizes[missing].tolist(), strict=True)]
        new = {text: at for at, text in enumerate(texts) if text not in self._number_of}
        if self._num_words + len(new) > _MOST_WORDS or self._num_ids > _MOST_IDS:
            if self._num_words == 1:
                raise _TooManyWordsError
            self._forget()
            return self._numbers(data, starts, is_end)
        if new:
            at = missing[list(new.values())]
            self._remember(list(new), low[at], high[at], sizes[at])
        numbers[missing] = [self._number_of[text] for text in texts]
        return numbers

    def _places(
        self, low: NDArray[np.uint64], high: NDArray[np.uint64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        mixed = (low ^ (high * _MIX[1]) ^ sizes.astype(np.uint64)) * _MIX[0]
        again = (mixed ^ (mixed >> np.uint64(29))) * _MIX[2]
        shift = np.uint64(64 - (_SLOTS - 1).bit_length())
        return (mixed >> shift).astype(np.int64), (again >> shift).astype(np.int64)

    def _is_word(
        self, numbers: NDArray[Any], low: NDArray[np.uint64], high: NDArray[np.uint64], sizes: NDArray[np.int64]
    ) -> Bools:
        is_same: Bools = self._low[numbers] == low
        is_same &= self._high[numbers] == high
        is_same &= self._sizes[numbers] == sizes
        is_same &= sizes <= _LONGEST
        return is_same

    def _remember(
        self, words: Sequence[bytes], low: NDArray[np.uint64], high: NDArray[np.uint64], sizes: NDArray[np.int64]
    ) -> None:
        """Ask the library for the ids of new words."""
        letters = [word.decode("latin-1").translate(_LETTERS) for word in words]
        encoded = [each.ids for each in self._words.encode_batch_fast(letters, add_special_tokens=False)]
        counts = np.array(list(map(len, encoded)), np.int64)
        ids = np.fromiter(itertools.chain.from_iterable(encoded), np.uint32, int(counts.sum()))
        if self._num_ids + len(ids) > len(self._ids):
            self._ids = np.append(self._ids, np.zeros(max(len(self._ids), len(ids)), np.uint32))
        self._ids[self._num_ids : self._num_ids + len(ids)] = ids
        numbers = np.arange(self._num_words, self._num_words + len(words))
        for values, of_all in ((low, self._low), (high, self._high), (sizes, self._sizes), (counts, self._counts)):
            of_all[numbers] = values
        self._firsts[numbers] = self._num_ids + np.cumsum(counts) - counts
        self._number_of.update(zip(words, numbers.tolist(), strict=True))
        self._num_ids += len(ids)
        self._num_words += len(words)
        left, places = np.flatnonzero(sizes <= _LONGEST), self._places(low, high, sizes)
        for place in places:  # a word that finds both taken is looked up by its bytes
            free = left[self._slots[place[left]] == 0]
            self._slots[place[free]] = numbers[free]
            left = left[self._slots[place[left]] != numbers[left]]


_MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


# -------------------------------------------------------------------------------------------------------- where to cut


def _shifted(flags: Bools, by: int) -> Bools:
    """What is ``by`` places before each one, False where nothing is; negative: behind."""
    moved = np.zeros_like(flags)
    if by > 0:
        moved[by:] = flags[:-by]
    else:
        moved[:by] = flags[-by:]
    return moved


def _changes(classes: NDArray[np.uint8]) -> Bools:
    """Where a class begins, and each end of a text."""
    begins = np.empty(len(classes), np.bool_)
    begins[0] = True
    np.not_equal(classes[1:], classes[:-1], out=begins[1:])
    begins |= classes == _END
    return begins


def _cut_contractions(codes: NDArray[Any], begins: Bools, *, any_case: bool) -> None:
    """``'s``, ``'t``, ``'re``, ``'ve``, ``'m``, ``'ll``, ``'d`` are words where a word begins with the apostrophe."""
    at = np.flatnonzero((codes == ord("'")) & begins)  # an end of a text follows

    def letter(offset: int) -> NDArray[Any]:
        found = codes[np.minimum(at + offset, len(codes) - 1)]
        is_capital = (found >= ord("A")) & (found <= ord("Z"))
        return np.where(is_capital & any_case, found | 0x20, found)

    one, two = letter(1), letter(2)
    short = np.isin(one, [ord(each) for each in "sdmt"])
    long = np.zeros(len(at), np.bool_)
    for a, b in ("ll", "ve", "re"):
        long |= (one == ord(a)) & (two == ord(b))
    for which, size in ((short, 2), (long, 3)):
        begins[at[which] + 1] = False
        begins[at[which] + size] = True  # at the latest the end of the text is there


def _cuts_of_gpt_2(codes: NDArray[Any], classes: NDArray[np.uint8], _: int) -> Bools:
    """Where GPT-2's words begin."""
    begins = _changes(classes)
    is_space = classes == _SPACE
    last = is_space & ~_shifted(is_space, -1) & ~_shifted(classes == _END, -1)  # of white space before something
    begins |= last
    begins &= ~_shifted(last & (codes == ord(" ")), 1)
    _cut_contractions(codes, begins, any_case=False)
    return begins


def _cuts_of_llama_3(codes: NDArray[Any], classes: NDArray[np.uint8], digits: int) -> Bools:
    """Where Llama 3's and Qwen 2's words begin, which have so many digits at most."""
    begins = _changes(classes)
    is_space, is_other, is_letter, is_digit = (classes == each for each in (_SPACE, _OTHER, _LETTER, _DIGIT))
    is_newline = (codes == ord("\n")) | (codes == ord("\r"))
    runs = np.flatnonzero(begins)
    # lines end with the last newline of their white space, and with those right behind punctuation
    first = np.flatnonzero(is_newline & ~_shifted(is_newline, 1))
    final = np.flatnonzero(is_newline & ~_shifted(is_newline, -1))
    end_of_run = runs[np.searchsorted(runs, final, "right")] if len(final) else final
    is_last = np.append(first[1:], len(codes)) >= end_of_run
    begins[final[is_last] + 1] = True
    behind = _shifted(is_other, 1)[first]
    begins[first[behind]] = False
    begins[final[behind] + 1] = True
    # the last blank before something goes with letters, and a space with punctuation
    last = is_space & ~is_newline & ~_shifted(is_space, -1) & ~_shifted(classes == _END, -1)
    begins |= last
    joined = (_shifted(last, 1) & is_letter) | (_shifted(last & (codes == ord(" ")), 1) & is_other)
    begins &= ~joined
    # so does a single sign
    single = is_other & begins & _shifted(is_letter, -1)
    begins &= ~_shifted(single, 1)
    _cut_contractions(codes, begins, any_case=True)
    at = np.flatnonzero(is_digit)
    if digits == 1:
        begins[at] = True
    elif len(at):
        starts = np.maximum.accumulate(np.where(begins[at], at, 0))
        begins[at[(at - starts) % digits == 0]] = True
    return begins


# ---------------------------------------------------------------------------------------------- the tokenizer's rules


def _listed(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if document.get("type") == "Sequence":
        return [each for part in document[name] for each in _listed(part, name)]
    return [document] if document else []


def _pattern(pre_tokenizer: dict[str, Any]) -> str:
    """The expression that cuts words."""
    match _listed(pre_tokenizer, "pretokenizers"):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT_2
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if pattern in PATTERNS:
            return str(pattern)
        case parts:
            names = " and ".join(str(part.get("type")) for part in parts) or "nothing"
            raise NotPiecewiseError(f"its words are cut by rules that are not known here ({names})")


def _is_nfc(normalizer: dict[str, Any]) -> bool:
    names = {str(each.get("type")) for each in _listed(normalizer, "normalizers")}
    if names - {"NFC"}:
        raise NotPiecewiseError(f"it changes texts before it cuts them ({', '.join(sorted(names))})")
    return bool(names)


def _added_tokens(
    tokenizer: tokenizers.Tokenizer, *, is_nfc: bool
) -> tuple[re.Pattern[str] | None, dict[str, int], re.Pattern[str] | None]:
    """What splits a text at added tokens, their ids, and what finds those that are not found by their text alone."""
    plain: dict[str, int] = {}
    odd: list[str] = []
    added = list(tokenizer.get_added_tokens_decoder().values())
    kinds = {token.normalized for token in added}
    for token in added:
        number = tokenizer.token_to_id(token.content)
        # where there are both, those that are not normalized are found first, wherever they stand
        is_plain = not (token.lstrip or token.rstrip or token.single_word) and (not token.normalized or len(kinds) == 1)
        if not token.content:
            continue
        if is_plain and number is not None and (token.content.isascii() or not (is_nfc and token.normalized)):
            plain[token.content] = number
        else:
            odd.append(token.content)
    return _any_of(plain, "({})"), plain, _any_of(odd, "(?:{})")


def _any_of(tokens: Iterable[str], form: str) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)  # as the library finds them
    return re.compile(form.format("|".join(map(re.escape, longest_first)))) if longest_first else None
