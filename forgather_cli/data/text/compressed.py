"""Files that may be compressed, read as streams: gz, bz2, xz and zst."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from forgather_cli.documents.regular_files import open_file
from forgather_cli.errors import DataError

_CHUNK = 1 << 16  # bytes of a file that are decompressed at once


class Opened:
    """A file whose decompressed bytes ``handle`` reads."""

    def __init__(self, raw: BinaryIO, handle: BinaryIO) -> None:
        self._raw, self.handle = raw, handle
        self._reported = 0

    def seek(self, position: int) -> None:
        """To a place in a file that is not compressed."""
        if position:
            self.handle.seek(position)
            self._reported = position

    def progress(self) -> int:
        """Bytes of the file, as it lies on disk, read since the last call."""
        before, self._reported = self._reported, self._raw.tell()
        return self._reported - before


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """A file to read from, decompressed by its suffix.

    Raises DataError for one that cannot be read, is damaged, or needs a package that is not installed.
    """
    codec = CODECS.get(path.suffix.lower())
    try:
        with open_file(path) as raw:
            if codec is None:
                yield Opened(raw, raw)
            else:
                with codec(raw, path) as handle:
                    yield Opened(raw, handle)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, _Damaged) as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        if codec is not None and error.errno is None:  # what bz2 says of its data
            raise _damaged(path, str(error)) from error
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def check_archives(paths: Iterable[Path]) -> None:
    """Raise DataError for a compressed file of no bytes, a fetch that failed: of an empty text there is a header, and
    most readers take no bytes for it."""
    for path in paths:
        if path.suffix.lower() in CODECS and not path.stat().st_size:
            raise _damaged(path, "it has 0 bytes")


def _damaged(path: Path, why: str) -> DataError:
    suffix = path.suffix.lower()
    return DataError(f"{path}: a damaged {suffix} file, or none ({why}); fetch it again, or leave it out")


class _Damaged(Exception):
    pass


CODECS: dict[str, Callable[[BinaryIO, Path], Any]] = {
    ".gz": lambda raw, _: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".bz2": lambda raw, _: bz2.BZ2File(raw),
    ".xz": lambda raw, _: lzma.LZMAFile(raw),  # noqa: SIM115 - the caller closes it
    ".zst": lambda raw, path: io.BufferedReader(_ZstdFile(raw, _zstd_frames(path)), _CHUNK),
}
"""By suffix: a handle on the decompressed bytes of a file."""


def _zstd_frames(path: Path) -> Callable[[], Any]:
    """Makes decompressors of one frame: of the standard library (Python 3.14), else of the package zstandard."""
    with contextlib.suppress(ImportError):
        decompressor: Callable[[], Any] = importlib.import_module("compression.zstd").ZstdDecompressor
        return decompressor
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        raise DataError(f"{path}: zst files need the package zstandard; pip install zstandard") from error
    # files of zstd --long=31 are read too, which its own tool does only with that option
    return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


class _ZstdFile(io.RawIOBase):
    """Frames of a zst file, one after the other.

    The package's own ``stream_reader`` takes a file that was cut off for one that ends there (zstandard 0.25).
    """

    def __init__(self, raw: BinaryIO, frame: Callable[[], Any]) -> None:
        self._raw, self._new = raw, frame
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            # a little at a time: 4 bytes may become 128 KiB
            if not self._input and not (data := self._raw.read(1 << 12)):
                if self._frame is not None:
                    raise _Damaged("it ends in the middle")
                return 0
            self._output = memoryview(self._decompressed(self._input or data))
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count

    def _decompressed(self, data: bytes) -> bytes:
        self._frame = self._frame or self._new()
        try:
            output: bytes = self._frame.decompress(data)
        except Exception as error:  # either library has its own ZstdError
            if type(error).__name__ != "ZstdError":
                raise
            raise _Damaged(str(error)) from error
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
        return output
