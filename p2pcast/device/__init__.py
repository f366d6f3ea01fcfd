"""The codec's passes over every word, with torch's operations, on the device that holds the words: a GPU, or the CPU in
tests.

Promise: results equal those of ``p2pcast.codec``'s kernels bit for bit, and only changes cross to the host. Bits are
held in signed integers that wrap, since torch computes with these on every device. This package imports torch. Nothing
else in ``p2pcast`` imports it, except for measurements.
"""

from p2pcast.device.device_context import encode_context_on_device
from p2pcast.device.device_ranks import class_ranks
from p2pcast.device.digests import digest_box, digest_row, to_int
from p2pcast.device.scan import RUN_BYTES, Changes, compare
from p2pcast.device.words import words_of

__all__ = [
    "RUN_BYTES", "Changes", "class_ranks", "compare", "digest_box", "digest_row",
    "encode_context_on_device", "to_int", "words_of",
]  # fmt: skip
