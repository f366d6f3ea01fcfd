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
"""Unit of hashing and forwarding: small, because a chain of k hops adds k pieces to the time to the last peer. Small artifacts have smaller ones (artifact.piece_size)."""
ANCHOR_PIECE_BYTES = MIB
"""Anchors are long, so their latency a hop matters less than their number of hashes; small ones are cut finer too."""
BATCH_PIECES = 64
"""At most this many pieces are vouched for by one signature: 4 MiB of a delta, 1 MiB of what is cut finest."""
BATCH_CELLS = 4096
"""At most this many directory entries in one batch."""
MAX_SIGNED_BYTES = 512 * KIB
"""A signed record other than a manifest."""
MAX_MANIFEST_BYTES = 4 * MIB
MAX_DURABLE_BYTES = KIB
"""A signed durable record: 230 bytes today; the rest is room for ignorable fields."""
MAX_EVIDENCE = 8
"""Signed records of its newest versions that a peer shows to a hub when it joins."""
MAX_PARTS = 64
"""Parts of one version beside its state."""
MAX_PART_NAME = 64
"""A part's name, in characters."""
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
MAX_WAYS = 8
"""Addresses at which one node may be found: two families, advertised, observed and its own, with room to spare."""
MAX_SOURCES = 64
"""Nodes that may be named to one that pulls, or that it has done with."""
MAX_KEPT = 1000
"""Greatest number of deltas and of anchors that a user may have a store keep, of versions between anchors, and of a peer's deltas since its anchor. With as many
squashes, the list of a store fits one message (MAX_CATALOG)."""
MAX_HELD = 1024
"""Artifacts that one report may name: ten times what a peer keeps."""
MAX_GARBLED = 64
"""Nodes that one report may blame."""
MAX_LACKING = 64
"""Stalled sealed artifacts in one report: more than a way to the newest version has."""
MAX_OBJECT_NAME = 128
"""Bytes of a name of a mirror's object, below the run's folder: the longest that there is has 100."""
MAX_SPOILT = 64
"""Objects of a mirror that one report may complain of."""
MAX_PEER_ENGINES = 64
"""Engines of one peer: eight times what a host with eight accelerators runs. Each has rows of its own in /status and metrics."""
MAX_REPORTED_ERROR = 300
"""Characters of an error in a report: those of 64 engines fit in one. /status of the peer itself has all of it."""
MAX_DETAILS = 64
"""Figures that an installer may add to an engine's row; the longest of ours has nine."""
MAX_CORES = 1 << 16
"""Cores with which a peer may claim to decode."""
MAX_ASKED = 4096
"""Pieces that one child may have asked of a node and not been sent: far above any window."""
MAX_STRAYS = 32
"""Artifacts that a parent may have opened and the hub does not list: as a rule one, until the hub's word of it has come."""
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

FIRST_WORD_S = 10.0
"""Time after which a link ends if its dialer has not said what the link is for (JOIN, ATTACH, RANK, MEMBER), in seconds. An honest dialer sends that message with its
last one of the handshake."""
MAX_LINKS_OF_NODE = 16
"""Links that one node may have dialled to one daemon: a control link, two of a child, one of a puller, and each of them once more while the daemon has not noticed the end of the old one."""
MAX_PULLS_OF_NODE = 2
"""Links over which one node may pull from another: one in use, and a dead one whose end has not been noticed."""
MAX_UNREAD_BYTES = 2 * MIB
"""Bytes of answers that may wait for a node that does not read them, beyond what a connection queues anyway: more than all that a hub sends to a newcomer."""
RATION_PER_S = 1000.0
"""Units that one node may spend in a second (`transport.ration`): a twentieth of a core. A busy peer needs some tens."""
RATION_BURST = 10_000.0
"""Units that one node may spend at once: a peer that comes back after a long time and asks for everything needs a quarter of them."""
MAX_RATIONS = MAX_PEERS
"""Nodes whose rations a daemon remembers."""
MAX_SQUASHES_OF_NODE = 2
"""Squashes that are made for one peer at one time, of `keeping.MAX_WAITING` in all."""
MAX_CALLS_OF_NODE = 2
"""Answers to one node's CALLs that are under way at one time: one for a parent, one for a source."""

# -- trust
MAX_TOKENS = 4096
"""Join tokens that a hub keeps in mind."""
MAX_HOLDERS = 1 << 16
"""Nodes with a certificate in force, trainers' connections among them."""
MAX_EVICTED = MAX_PEERS
"""Nodes that one message may name."""
STATEMENT_BYTES = 97
"""A signed statement about an eviction: node, token, serial, flag, signature."""
MAX_STATEMENTS = 1024
"""Statements in one message of a hub: a peer verifies them in 0.1 s."""
MAX_RETOLD = 64
"""Statements in one report of a peer: 6 KiB of the 64 that a report may have."""
MAX_REVOKED = 1 << 16
"""Tokens whose revocation a hub remembers after the tokens themselves are forgotten."""
MAX_SHOWN = 8
"""Tokens of one node that a hub remembers: as a rule it has shown one or two."""
MAX_CERTIFICATE_BYTES = 4 * KIB
"""A certificate, or a request for one, in DER. Ours have about 500 bytes."""

# -- publishing from a trainer's ranks
MAX_RANKS = 1 << 16
"""Ranks of one publisher, each with a connection of its own."""
MAX_PART_BYTES = 32 * MIB
"""A part of a cell: a whole cell of 8-byte words as it is. No codec makes more of it, since none is taken that does."""
PARTS_HIGH_BYTES = 256 * MIB
"""Parts that may wait at the hub for the rest of their cells; beyond it the hub stops reading from the ranks that are ahead."""
PARTS_LOW_BYTES = 128 * MIB
MAX_ENGINES = 4096
"""Engines of which a rank is told."""
MAX_ENGINE_NAME = 160
"""``peer/engine``, in characters."""
MAX_CELLS = 1 << 20
"""Of a layout that ranks bring: 4 Ti words in cells of the usual size. A few bytes can state a layout of any number of cells."""
MAX_CELL_PARTS = 4096
"""Parts of one cell: more than ranks that could share 4 Mi words in earnest."""

# -- engines that span hosts
MAX_SPAN_NAME = 64
"""Name of an engine that spans hosts, in characters."""
MAX_MEMBERS = 256
"""Hosts of one engine beside its lead's."""
MAX_CLAIMS = 4096
"""Engine names that a hub keeps for leads that are away."""
CLAIM_S = 600.0
"""Time for which a hub keeps an engine's name for a lead that is away, in seconds: longer than a machine takes to start again."""
MAX_KEPT_REPORTS_BYTES = 2 * 16 * MIB
"""Workers' reports that a member keeps while its lead is out of reach: an audit's, and another."""
MAX_REPORT_ITEMS = 2 * MIB
"""Rows and maps in one report: four times what the longest audit that fits has. Empty ones would take 64 times their length in memory."""

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

# -- HTTP
EVENTS_KEPT = 4096
"""Events that a reader may come back for: an hour of a busy hub, about 2 MiB."""
EVENTS_AT_ONCE = 256
"""Events in one write to a reader."""
MAX_SKIPPED = 256
"""Checkpoint folders that /status names as skipped; a trainer may spoil any number of them."""
MAX_EVENT_TEXT = 1000
"""Characters of one text in an event; errors are shorter."""
MAX_FAILURES_KEPT = 16
"""Failures of background tasks that a daemon shows; it counts all. The first failures are shown, since they tend to cause the later ones."""
MAX_READERS = 64
"""Readers of /events at one time: each may have 64 KiB and a few events under way."""
MAX_WAITERS = 256
"""Requests of /wait at one time. Each looks at the state whenever something happens."""
MAX_WAIT_S = 3600.0
"""A request of /wait; ask again after that."""
MAX_HTTP_CONNECTIONS = 1024
"""Open at one time, readers and waiters among them."""
MAX_SILENT_CONNECTIONS = 256
"""Of these, such as have not asked anything yet."""
