"""Limits on what other nodes, files and callers may send, each with its unit and reason.

Parsers check them before they allocate memory. A limit that only one module needs is defined in that module.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# -- layout and codec
CELL_WORDS = 4 * MIB
"""Words in a cell: 8 MiB of bf16. Small enough to decode in milliseconds; large enough for only 17 000 cells in a 70B
model.
"""
MAX_CELL_WORDS = 64 * MIB
"""Most words in a cell of any layout: a decoder holds one cell per core in memory."""
MAX_TENSORS = 1 << 20
"""Most tensors in a layout. The largest mixture-of-experts models have about 100 000."""
MAX_NAME_BYTES = 1024
"""Most bytes of a tensor's name, in UTF-8."""
MAX_DIMS = 16
"""Most dimensions of a tensor."""
MAX_STATE_BYTES = 1 << 46
"""Largest state, 64 TiB: keeps every offset far from 2^63."""
MAX_LAYOUT_BYTES = 64 * MIB
"""Largest layout document."""
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, the limit of that format itself."""

# -- artifacts
PIECE_BYTES = 64 * KIB
"""Size of a piece, the unit of hashing and forwarding. Small, because a chain of k hops adds k pieces to the time to
the last peer. Small artifacts have smaller pieces (``artifact.piece_size``).
"""
ANCHOR_PIECE_BYTES = MIB
"""Size of an anchor's piece. An anchor is long, so the number of hashes matters more than the latency of a hop. Small
anchors have smaller pieces.
"""
BATCH_PIECES = 64
"""Most pieces covered by one signature: 4 MiB in pieces of 64 KiB."""
BATCH_CELLS = 4096
"""Most directory entries in one batch."""
MAX_SIGNED_BYTES = 512 * KIB
"""Largest signed record other than a manifest."""
MAX_MANIFEST_BYTES = 4 * MIB
"""Largest manifest."""
MAX_DURABLE_BYTES = KIB
"""Largest signed durable record: 230 bytes today, with room for fields of later releases."""
MAX_EVIDENCE = 8
"""Most signed records of newest versions that a peer presents to a hub when it joins."""
MAX_PARTS = 64
"""Most parts of one version besides its state."""
MAX_PART_NAME = 64
"""Most characters of a part's name."""
MAX_FILES = 4096
"""Most small files in a version."""
MAX_PATH_BYTES = 512
"""Most bytes of a small file's path."""
MAX_SMALL_FILE_BYTES = 64 * MIB
"""Largest small file in a version: tokenizers reach 35 MB. Larger files are not sent."""
MAX_TAIL_BYTES = 2 * GIB
"""Largest tail of a .p2pd file. A tail is about 0.1 % of the log's size."""
MAX_BRANCH = (1 << 32) - 1
MAX_STEP = (1 << 63) - 1

# -- wire
MAX_PIECES = MAX_STATE_BYTES // PIECE_BYTES
MAX_STRIPES = 64
MAX_RANGES = 1 << 16
"""Most numbers in a HAVE: 32 768 gaps. Pieces arrive nearly in order, so honest messages hold a few."""
MAX_CATALOG = 4096
"""Most artifacts in one message."""
MAX_LAYOUTS = 64
"""Most layouts that a child may state as known. A run usually has one."""
MAX_PEERS = 16384
"""Most nodes in one message."""
MAX_NODE_ADDRESSES = 8
"""Most addresses of one node: advertised, observed and its own, in two families, with room to spare."""
MAX_SOURCES = 64
"""Most nodes in a list of sources, or of finished sources, for a pulling peer."""
MAX_KEPT = 1000
"""Upper bound of user settings: deltas kept, anchors kept, versions between anchors, deltas since a peer's anchor. With
as many squashes, the list of a store fits one message (MAX_CATALOG).
"""
MAX_HELD = 1024
"""Most artifacts in one report: ten times as many as a peer keeps."""
MAX_CORRUPT_SENDERS = 64
"""Most nodes blamed in one report."""
MAX_MISSING = 64
"""Most stalled sealed artifacts in one report: more than any path to the newest version has."""
MAX_OBJECT_NAME = 128
"""Most bytes of a mirror object's name below the run's folder; the longest name in use has 100."""
MAX_BAD_OBJECTS = 64
"""Most mirror objects reported as wrong in one report."""
MAX_PEER_ENGINES = 64
"""Most engines of one peer: eight times as many as a host with eight accelerators runs. Each engine has rows in /status
and in the metrics.
"""
MAX_REASONS = 8
"""Most reasons of its own for which one peer is unready."""
MAX_REPORTED_ERROR = 300
"""Most characters of an error in a report, so that the errors of 64 engines fit. The peer's own /status has the whole
text.
"""
MAX_DETAILS = 64
"""Most figures that an installer may add to an engine's row; p2pcast's own installers add at most nine."""
MAX_CORES = 1 << 16
"""Most cores that a peer may claim for decoding."""
MAX_REQUESTED = 4096
"""Most pieces that one child may have requested and not received: far above any window."""
MAX_UNLISTED = 32
"""Most artifacts of a parent that the hub has not listed yet. Usually one, until the hub's list arrives."""
MIN_PIECE_BYTES = KIB
MAX_PIECE_BYTES = 4 * MIB
"""Range of the size of a piece, a power of two: a relay holds several pieces per link in memory."""
CELL_OVERHEAD_BYTES = 256
"""Bytes of a codec's header. A coded cell is at most this plus twice its raw bytes (steps and gaps of a cell in which
every word changed).
"""
MAX_FILES_BYTES = GIB
"""Most bytes of all small files of one version together."""
MAX_PATH_PART_BYTES = 255
"""Most bytes of one name in a path, the usual limit of file systems."""
MAX_HANDSHAKES = 256
"""Most concurrent unauthenticated connections."""

FIRST_MESSAGE_S = 10.0
"""Time limit in seconds for the dialer to state the purpose of a link (JOIN, ATTACH, RANK, MEMBER). An honest dialer
sends that message together with its last message of the handshake.
"""
MAX_LINKS_PER_NODE = 16
"""Most links that one node may have dialled to one daemon: a control link, two as a child, one for pulling. Each counts
twice while the daemon has not noticed the old link's end.
"""
MAX_PULLS_PER_NODE = 2
"""Most links over which one node may pull from another: one in use, and a dead one that has not been noticed yet."""
MAX_UNREAD_BYTES = 2 * MIB
"""Most bytes of answers that wait for a node that does not read, beyond a connection's usual queue. More than all that
a hub sends to a newcomer.
"""
REQUEST_UNITS_PER_S = 1000.0
"""Units that one node may spend per second (`transport.rate_limit`): a twentieth of a core. A busy peer spends some
tens.
"""
REQUEST_UNITS_BURST = 10_000.0
"""Units that one node may spend at once. A peer that returns after a long time and requests everything needs a quarter.
"""
MAX_RATE_LIMITS = MAX_PEERS
"""Most nodes whose rate limits a daemon remembers."""
MAX_SQUASHES_PER_NODE = 2
"""Most squashes made for one peer at the same time."""
MAX_CALLS_PER_NODE = 2
"""Most pending answers to one node's CALLs: one for a parent, one for a source."""

# -- trust
MAX_TOKENS = 4096
"""Most join tokens that a hub records."""
MAX_HOLDERS = 1 << 16
"""Most nodes with a valid certificate, trainers' connections included."""
MAX_EVICTED = MAX_PEERS
"""Most evicted nodes, all of which fit one message."""
STATEMENT_BYTES = 97
"""Size of a signed statement about an eviction: node, token, serial, flag, signature."""
MAX_STATEMENTS = 1024
"""Most statements in one message of a hub: a peer verifies them in 0.1 s."""
MAX_RELAYED = 64
"""Most statements in one report of a peer: 6 KiB of the 64 KiB of a report."""
MAX_REVOKED = 1 << 16
"""Most revocations that a hub remembers after their tokens are forgotten."""
MAX_NODE_TOKENS = 8
"""Most tokens of one node that a hub remembers. Usually a node has used one or two."""
MAX_CERTIFICATE_BYTES = 4 * KIB
"""Largest certificate or certificate request, in DER. p2pcast's own have about 500 bytes."""

# -- publishing from a trainer's ranks
MAX_RANKS = 1 << 16
"""Most ranks of one publisher, each with its own connection."""
MAX_PART_BYTES = 32 * MIB
"""Largest part of a cell: a whole raw cell of 8-byte words. A codec's output is used only if it is smaller."""
PARTS_HIGH_BYTES = 256 * MIB
"""Bytes of parts, waiting at the hub for the rest of their cells, above which the hub stops reading from ranks that are
ahead.
"""
PARTS_LOW_BYTES = 128 * MIB
"""Bytes of waiting parts below which the hub reads again."""
MAX_ENGINES = 4096
"""Most engines in the hub's messages to a rank."""
MAX_ENGINE_NAME = 160
"""Most characters of ``peer/engine``."""
MAX_CELLS = 1 << 20
"""Most cells of a layout from ranks: 4 Ti words in cells of the default size. A message of a few bytes can state a
layout with any number of cells.
"""
MAX_CELL_PARTS = 4096
"""Most parts of one cell: more than any sensible number of ranks that share 4 Mi words."""

# -- engines that span hosts
MAX_SPAN_NAME = 64
"""Most characters of the name of an engine that spans hosts."""
MAX_MEMBERS = 256
"""Most hosts of one engine besides its lead's."""
MAX_CLAIMS = 4096
"""Most engine names that a hub reserves for absent leads."""
CLAIM_S = 600.0
"""Seconds for which a hub reserves an engine's name for an absent lead: longer than a machine takes to restart."""
MAX_KEPT_REPORTS_BYTES = 2 * 16 * MIB
"""Most bytes of ranks' reports that a member stores while its lead is unreachable: an audit's report and one more."""
MAX_REPORT_ITEMS = 2 * MIB
"""Most rows and maps in one report: four times as many as in the longest audit that fits. Empty maps take 64 times
their encoded length in memory.
"""

# -- install socket and vLLM workers
MAX_INSTALL_REQUEST_BYTES = 16 * MIB
"""Largest request of a worker: an audit lists a digest per mapped block, about 40 bytes each."""
MAX_INSTALL_FILES = 128
"""Most patch files passed at once: more than the retained 100 deltas. The kernel's own limit is 253."""
MAX_INSTALL_CONNECTIONS = 256
"""Most connections of workers: several times the workers of one host."""
INSTALL_IDLE_S = 60.0
"""Time in seconds after which a silent connection is closed; a worker sends its request right after connecting."""
INSTALL_CHUNK_BYTES = 64 * MIB
"""Most device memory that staging may hold at the same time."""

# -- HTTP
EVENTS_KEPT = 4096
"""Number of events kept for returning readers: an hour of a busy hub, about 2 MiB."""
EVENTS_AT_ONCE = 256
"""Most events in one write to a reader."""
MAX_SKIPPED = 256
"""Most skipped checkpoint folders in /status; a trainer may write any number of invalid ones."""
MAX_EVENT_TEXT = 1000
"""Most characters of one text in an event; errors are shorter."""
MAX_FAILURES_KEPT = 16
"""Most failures of background tasks in /status, which counts all. The first ones are kept, since they tend to cause the
later ones.
"""
MAX_READERS = 64
"""Most readers of /events at the same time: each may have 64 KiB and a few events in flight. Callers with the bearer
may be as many more, and as many more may wait.
"""
MAX_WAITERS = 256
"""Most requests of /wait at the same time. Each checks its condition at every event."""
MAX_WAIT_S = 3600.0
"""Longest time in seconds of one /wait request."""
MAX_HTTP_CONNECTIONS = 1024
"""Most open HTTP connections, readers and waiters included, of a process that may open many files."""
MIN_HTTP_CONNECTIONS = 16
"""Open HTTP connections that a process may have, however few files it may open."""
MIN_ADDRESS_CONNECTIONS = 256
"""Open HTTP connections that one address may have by default, if all callers may have as many. Many workers may stand
behind one proxy.
"""
MAX_SLOTS = 4096
"""Most plays of one rollout worker at the same time; each has a lease in the worker's heartbeats."""

SHADOW_KEPT_DAYS = 7.0
"""Days for which an unused shadow is kept in tmpfs: long enough to pause a run over a weekend."""
