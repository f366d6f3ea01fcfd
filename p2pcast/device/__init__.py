"""The codec's passes over all words, as torch operations on the device where the words are: a GPU, or the CPU in tests.

Guarantees: results equal those of ``p2pcast.codec``'s kernels bit for bit, and only changes are copied to the host.
Words are represented as signed integers that wrap, since torch supports these on every device. This package imports
torch. Except for measurements, nothing else in ``p2pcast`` imports this package.
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
