"""Codec ``dense`` (docs/formats/delta-format.md §3): a cell's new words as byte planes, each with zstd or raw. Decoding
does not need the old words.

Guarantee: a decoder allocates no more than the cell's size, whatever a payload claims.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from p2pcast.codec.digest import word_dtype
from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import IntegrityError

VERSION = 1
ZSTD_LEVEL = 1
_HEAD = struct.Struct("<BBHI")
_SAMPLE_BYTES = 16 * 1024

Buffer = bytes | bytearray | memoryview


class _PerThread(threading.local):
    """zstd contexts: they are costly to create, and only one thread at a time may use each."""

    def __init__(self) -> None:
        self.matching = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        # Gaps and steps are memoryless: repeats occur by chance, and coding a repeat takes more bytes and time than
        # coding its symbols. With these parameters zstd finds nearly no matches, so it only does Huffman coding. The
        # output is smaller and takes half the time.
        rarely = zstandard.ZstdCompressionParameters.from_level(ZSTD_LEVEL, min_match=7, hash_log=6)
        self.memoryless = zstandard.ZstdCompressor(compression_params=rarely)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _PerThread()


def pack_stream(raw: npt.NDArray[np.uint8], *, memoryless: bool = False) -> bytes:
    """Return ``raw``, or one zstd frame if that is smaller. ``memoryless``: use entropy coding without matches."""
    compressor = _contexts.memoryless if memoryless else _contexts.matching
    frame: bytes = compressor.compress(raw.data)
    return frame if len(frame) < raw.size else raw.tobytes()


def unpack_stream(stored: memoryview, raw_bytes: int, where: str) -> memoryview:
    """Undo ``pack_stream``. The caller must have bounded ``raw_bytes``. Raises IntegrityError."""
    if len(stored) == raw_bytes:
        return stored
    if len(stored) > raw_bytes:
        raise IntegrityError(f"{where}: stored in {len(stored)} bytes, more than its {raw_bytes} raw bytes")
    try:
        # zstd allocates the size stated in the frame, so the frame must state exactly the expected size.
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise IntegrityError(f"{where}: its zstd frame is not one of {raw_bytes} bytes")
        raw = _contexts.decompressor.decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{where}: damaged zstd frame ({error})") from None
    if len(raw) != raw_bytes:
        raise IntegrityError(f"{where}: unpacks to {len(raw)} bytes, not {raw_bytes}")
    return memoryview(raw)


def encode_dense(words: npt.NDArray[Any]) -> bytes:
    """Return the payload of a cell whose new words are ``words`` (1-D, unsigned)."""
    width = words.dtype.itemsize
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, width)
    stored = [pack_stream(np.ascontiguousarray(planes[:, k])) for k in range(width)]
    head = _HEAD.pack(VERSION, width, 0, words.size) + struct.pack(f"<{width}I", *map(len, stored))
    return b"".join([head, *stored])


def estimate_dense(words: npt.NDArray[Any]) -> int:
    """Estimate the length in bytes of ``encode_dense``'s payload from three samples of the cell."""
    width = words.dtype.itemsize
    sample = _SAMPLE_BYTES
    if words.size <= 4 * sample:
        return len(encode_dense(words))
    starts = (0, (words.size - sample) // 2, words.size - sample)
    packed = sum(len(encode_dense(words[s : s + sample])) for s in starts)
    return packed * words.size // (len(starts) * sample) + _HEAD.size + 4 * width


def decode_dense(payload: Buffer, cell: Cell) -> npt.NDArray[Any]:
    """Return the cell's new words. Raises IntegrityError for a malformed payload."""
    where = f"cell {cell.index}: dense payload"
    view = memoryview(payload).cast("B")
    width = cell.word_bytes
    begin = _HEAD.size + 4 * width
    if len(view) < begin:
        raise IntegrityError(f"{where}: {len(view)} bytes are too few for its header of {begin}")
    version, stated_width, zero, count = _HEAD.unpack_from(view)
    if version != VERSION:
        raise IntegrityError(f"{where}: version {version}; this p2pcast reads version {VERSION}")
    if stated_width != width or zero != 0:
        raise IntegrityError(
            f"{where}: words of {stated_width} bytes, the cell's have {width} (or reserved bits are set)"
        )
    if count != cell.words:
        raise IntegrityError(f"{where}: {count} words for a cell of {cell.words}")
    sizes = struct.unpack_from(f"<{width}I", view, _HEAD.size)
    if begin + sum(sizes) != len(view):
        raise IntegrityError(f"{where}: planes of {sum(sizes)} bytes in a payload of {len(view)}")
    out = np.empty((cell.words, width), dtype=np.uint8)
    for k, size in enumerate(sizes):
        plane = unpack_stream(view[begin : begin + size], cell.words, f"{where}: plane {k}")
        out[:, k] = np.frombuffer(plane, dtype=np.uint8)
        begin += size
    return out.reshape(-1).view(word_dtype(width))
