"""What the codec does word by word, with torch's own operations, where the words lie: on a GPU, or on the CPU in tests.

Promise: the same numbers as ``p2pcast.codec``'s kernels give, to the bit; only what changed crosses to the host. Arrays of bits are seen as signed
integers, which torch computes with everywhere, and wrap. Imports torch: nothing else in ``p2pcast`` imports this package but for a measurement.
"""

from p2pcast.device.context import encode_context_on_device
from p2pcast.device.digests import digest_box, digest_row, to_int
from p2pcast.device.ranks import class_ranks
from p2pcast.device.scan import RUN_BYTES, Changes, compare
from p2pcast.device.words import words_of

__all__ = [
    "RUN_BYTES", "Changes", "class_ranks", "compare", "digest_box", "digest_row", "encode_context_on_device", "to_int", "words_of",
]  # fmt: skip
