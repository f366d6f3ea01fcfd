"""Every limit, with its unit and its reason. Readers check these before they allocate."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# -- layout and codec
CELL_WORDS = 4 * MIB
"""Words in a cell: 8 MiB of bf16, small enough to decode in milliseconds, large enough that a 70B model has 17 000."""
MAX_CELL_WORDS = 64 * MIB
"""No layout may ask for larger cells: a decoder holds one per core in memory."""
MAX_TENSORS = 1 << 20
"""Tensors in a layout. The largest mixture-of-experts models have about 100 000."""
MAX_NAME_BYTES = 1024
"""A tensor's name, in UTF-8."""
MAX_DIMS = 16
"""Dimensions of a tensor."""
MAX_STATE_BYTES = 1 << 46
"""64 TiB: keeps every offset far from 2^63."""
MAX_LAYOUT_BYTES = 64 * MIB
"""The layout document."""
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
"""The cap that the safetensors format itself sets."""

# -- artifacts
PIECE_BYTES = 64 * KIB
"""Unit of hashing and forwarding: small, because a chain of k hops adds k pieces to the time to the last peer."""
ANCHOR_PIECE_BYTES = MIB
"""Anchors are long, so their latency a hop matters less than their number of hashes."""
BATCH_PIECES = 64
"""At most this many pieces are vouched for by one signature (4 MiB of a delta)."""
BATCH_CELLS = 4096
"""At most this many directory entries in one batch."""
MAX_SIGNED_BYTES = 512 * KIB
"""A signed record other than a manifest."""
MAX_MANIFEST_BYTES = 4 * MIB
MAX_FILES = 4096
"""Small files that travel with a version."""
MAX_PATH_BYTES = 512
MAX_SMALL_FILE_BYTES = 64 * MIB
"""Tokenizers reach 35 MB; anything above is not a small file and does not travel."""
MAX_TAIL_BYTES = 2 * GIB
"""The tail of a .p2pd file: about 0.1 % of its log."""
MAX_BRANCH = (1 << 32) - 1
MAX_STEP = (1 << 63) - 1

# -- wire
MAX_PIECE_BYTES = ANCHOR_PIECE_BYTES
MAX_PIECES = MAX_STATE_BYTES // PIECE_BYTES
MAX_STRIPES = 64
MAX_RANGES = 1 << 16
"""Numbers in a HAVE: 32 768 gaps. Pieces arrive nearly in order, so real ones hold a few."""
MAX_CATALOG = 4096
"""Artifacts that one message may name."""
MAX_LAYOUTS = 64
"""Layouts that a child may say it knows. A run has one as a rule."""
MAX_PEERS = 16384
"""Nodes that one message may name."""
MIN_PIECE_BYTES = KIB
MAX_PIECE_BYTES = 4 * MIB
"""A piece is a power of two in this range: a relay holds several per link in memory."""
CELL_OVERHEAD_BYTES = 256
"""A coded cell is never larger than twice its raw bytes (steps and gaps of a cell that changed everywhere) and this, the codecs' own headers."""
MAX_FILES_BYTES = GIB
"""All small files of one version together."""
MAX_PATH_PART_BYTES = 255
"""What file systems take for one name."""
MAX_HANDSHAKES = 256
"""Connections that may be without a token at one time."""

# -- install socket and vLLM workers
MAX_INSTALL_REQUEST_BYTES = 16 * MIB
"""A worker's request: an audit lists a digest per mapped block, about 40 bytes each."""
MAX_INSTALL_FILES = 128
"""Patch files handed over at once, more than the retained 100 deltas; the kernel's own limit is 253."""
MAX_INSTALL_CONNECTIONS = 256
"""Workers of one host, several times over."""
INSTALL_IDLE_S = 60.0
"""A worker asks at once after connecting; a silent connection is dropped after this."""
INSTALL_CHUNK_BYTES = 64 * MIB
"""Device memory that staging may hold at one time."""
