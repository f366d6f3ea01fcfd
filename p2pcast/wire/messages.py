"""The body of every message: one record per type (docs/formats/wire-protocol.md, sections 1, 2 and 4 to 7).

A field with a default was added in a later release, or is not always sent. If its key is missing, the field reads as
None. Signed messages and PIECE have no records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.wire.constraints import AtMost, Binary, Blob, Integer, OneOf, Text
from p2pcast.wire.field_types import (
    Address,
    AddressList,
    ArtifactId,
    Bytes16,
    Bytes32,
    Certificate,
    Digest,
    EngineName,
    Epoch,
    HandleProgress,
    Host,
    Micros,
    Name,
    Node,
    NodePath,
    Place,
    Places,
    Port,
    Protocol,
    Ranges,
    Reason,
    RunId,
    Serial,
    Size,
    Statement,
    Stripe,
    StripeCount,
)
from p2pcast.wire.field_types import Listed as Listed
from p2pcast.wire.field_types import LiveEngine as LiveEngine
from p2pcast.wire.field_types import Missing as Missing
from p2pcast.wire.field_types import Offered as Offered
from p2pcast.wire.field_types import Route as Route
from p2pcast.wire.field_types import Wanted as Wanted
from p2pcast.wire.lenient_report import EngineStatus as EngineStatus
from p2pcast.wire.lenient_report import ParentLinkReport as ParentLinkReport
from p2pcast.wire.lenient_report import Progress as Progress
from p2pcast.wire.lenient_report import Report as Report
from p2pcast.wire.lenient_report import UnreadyReason as UnreadyReason
from p2pcast.wire.message_types import MAX_BODY as MAX_BODY
from p2pcast.wire.message_types import PLAIN as PLAIN
from p2pcast.wire.message_types import SIGNED as SIGNED
from p2pcast.wire.message_types import Type as Type
from p2pcast.wire.records import NO_BODY as NO_BODY
from p2pcast.wire.records import RECORDS as RECORDS
from p2pcast.wire.records import Record as Record
from p2pcast.wire.records import decode as decode
from p2pcast.wire.records import encode as encode
from p2pcast.wire.records import encode_map as encode_map
from p2pcast.wire.records import message

# -- any connection


@message(Type.HELLO)
class Hello(Record):
    v: Protocol
    run: RunId
    node: Node
    name: Name
    nonce: Bytes32
    token: Annotated[bytes, Binary(8)]
    purpose: Annotated[str, OneOf(("control", "data", "publish", "engine", "enrol"))]
    role: Annotated[str, OneOf(("peer", "child", "parent", "rank", "member", "trainer", "worker", "ledger"))]
    link: Bytes16
    stripe: Stripe
    stripes: StripeCount
    least: Protocol | None = None
    greatest: Protocol | None = None


@message(Type.CHALLENGE)
class Challenge(Record):
    v: Protocol
    run: RunId
    node: Node
    nonce: Bytes32
    proof: Bytes32
    authority: Certificate | None = None


@message(Type.PROOF)
class Proof(Record):
    proof: Bytes32


@message(Type.READY)
class Ready(Record):
    v: Protocol | None = None


@message(Type.ERROR)
class Error(Record):
    code: Annotated[str, Text(32)]
    message: Annotated[str, Text(1024)]


@message(Type.PING)
class Ping(Record):
    t: Micros
    """Microseconds by the sender's clock."""


@message(Type.PONG)
class Pong(Record):
    t: Micros
    """The same as in the PING that is answered."""


# -- peer and hub


@message(Type.JOIN)
class Join(Record):
    name: Name
    region: Annotated[str, Text(128)]
    listen: Address
    held: Version | None
    engine: tuple[EngineName, Annotated[str, OneOf(("lead", "member"))]] | None
    ways: AddressList | None = None
    families: Annotated[Sequence[Annotated[int, OneOf((4, 6))]], AtMost(2)] | None = None


@message(Type.WELCOME)
class Welcome(Record):
    key: Bytes32
    epoch: Epoch
    commit: Annotated[str, OneOf(("auto", "manual", "barrier"))]
    target: Version | None
    host: Host
    bearer: Annotated[str, Text(128)] | None = None
    name: Name | None = None


@message(Type.PLAN)
class Plan(Record):
    epoch: Epoch
    parent: Node | None
    """None for the hub; ``host`` and ``port`` are then empty."""
    host: Host
    port: Port
    backups: Places


@message(Type.ENROL)
class Enrol(Record):
    request: Certificate


@message(Type.ISSUED)
class Issued(Record):
    certificate: Certificate


@message(Type.EVICTED)
class Evicted(Record):
    nodes: Annotated[Sequence[Node], AtMost(limits.MAX_EVICTED)]
    signed: Annotated[Sequence[Statement], AtMost(limits.MAX_STATEMENTS)] | None = None


@message(Type.NEIGHBOURS)
class Neighbours(Record):
    peers: Places


@message(Type.ADDRESSES)
class Addresses(Record):
    peers: Annotated[Sequence[Route], AtMost(limits.MAX_PEERS)]


@message(Type.CALL)
class Call(Record):
    node: Node
    stripes: StripeCount


@message(Type.CALLED)
class Called(Record):
    node: Node
    stripes: StripeCount
    ways: AddressList


@message(Type.UNREACHABLE)
class Unreachable(Record):
    node: Node


@message(Type.FIND_SOURCES)
class FindSources(Record):
    artifact: ArtifactId
    without: Annotated[Sequence[Node], AtMost(limits.MAX_SOURCES)]


@message(Type.SOURCES)
class Sources(Record):
    artifact: ArtifactId
    peers: Annotated[Sequence[Place], AtMost(limits.MAX_SOURCES)]


@message(Type.SQUASH)
class Squash(Record):
    base: Version


@message(Type.SQUASHING)
class Squashing(Record):
    """``version``: None if the hub makes no squash from ``base``."""

    base: Version
    version: Version | None
    bytes: Size
    wait_us: Micros


@message(Type.CATALOG)
class Catalog(Record):
    artifacts: Annotated[Sequence[Listed], AtMost(limits.MAX_CATALOG)]
    dropped: Annotated[Sequence[ArtifactId], AtMost(limits.MAX_CATALOG)]


@message(Type.COMMIT)
class Commit(Record):
    version: Version


@message(Type.HOLD)
class Hold(Record):
    version: Version


@message(Type.LEAVE)
class Leave(Record):
    pass


# -- parent and child, source and puller


@message(Type.LAYOUT)
class Layout(Record):
    layout: Bytes32
    document: Annotated[bytes, Blob(MAX_BODY[Type.LAYOUT])]


@message(Type.ATTACH)
class Attach(Record):
    live: bool
    layouts: Annotated[Sequence[Bytes32], AtMost(limits.MAX_LAYOUTS)]
    want: Annotated[Sequence[Wanted], AtMost(limits.MAX_CATALOG)]
    spare: Annotated[Sequence[ArtifactId], AtMost(limits.MAX_CATALOG)] | None = None
    reserve: bool | None = None


@message(Type.ATTACHED)
class Attached(Record):
    path: NodePath
    artifacts: Annotated[Sequence[Offered], AtMost(limits.MAX_CATALOG)]


@message(Type.PATH)
class Path(Record):
    path: NodePath


@message(Type.WANT)
class Want(Record):
    artifact: ArtifactId
    have: Ranges


@message(Type.REQUEST)
class Request(Record):
    artifact: ArtifactId
    pieces: Ranges
    seal: bool


@message(Type.HAVE)
class Have(Record):
    artifact: ArtifactId
    pieces: Ranges
    sealed: bool


@message(Type.CANCEL)
class Cancel(Record):
    artifact: ArtifactId
    pieces: Ranges


@message(Type.CANCELLED)
class Cancelled(Record):
    artifact: ArtifactId
    pieces: Ranges


@message(Type.SET_RATE)
class SetRate(Record):
    bytes_s: Annotated[int, Integer(1, limits.MAX_STATE_BYTES)] | None
    """None for no limit."""


@message(Type.ABORT)
class Abort(Record):
    pass


@message(Type.GONE)
class Gone(Record):
    artifact: ArtifactId


@message(Type.SKIP)
class Skip(Record):
    artifact: ArtifactId


@message(Type.ALIVE)
class Alive(Record):
    high: Annotated[Sequence[HandleProgress], AtMost(limits.MAX_CATALOG)]


# -- rank and hub


@message(Type.RANK)
class Rank(Record):
    group: Bytes16
    rank: Annotated[int, Integer(0, limits.MAX_RANKS - 1)]
    ranks: Annotated[int, Integer(1, limits.MAX_RANKS)]


@message(Type.RANKED)
class Ranked(Record):
    head: Version | None
    layout: Bytes32 | None
    state: Digest | None
    schedule: Bytes32 | None = None
    """BLAKE3 hash of the sparse-attention schedule in version ``head``."""


@message(Type.BEGIN)
class Begin(Record):
    serial: Serial
    step: Annotated[int, Integer(0, limits.MAX_STEP)]
    layout: Bytes32
    resume: bool
    branch: Annotated[int, Integer(0, limits.MAX_BRANCH)] | None = None
    """The branch that the trainer has opened by resuming."""


@message(Type.BEGUN)
class Begun(Record):
    serial: Serial
    version: Version
    base: Version | None
    codec: Annotated[str, Text(16)] | None = None


@message(Type.CELL)
class Cell(Record):
    serial: Serial
    cell: Size
    start: Annotated[int, Integer(0, limits.MAX_CELL_WORDS - 1)]
    words: Annotated[int, Integer(1, limits.MAX_CELL_WORDS)]
    codec: Annotated[int, Integer(1, 255)]
    before: Digest | None
    after: Digest
    changed: Annotated[int, Integer(0, limits.MAX_CELL_WORDS)]
    payload: Annotated[bytes, Blob(limits.MAX_PART_BYTES)]


@message(Type.PASSED)
class Passed(Record):
    serial: Serial
    cell: Size


@message(Type.FILE)
class File(Record):
    serial: Serial
    path: Annotated[str, Text(limits.MAX_PATH_BYTES)]
    contents: Annotated[bytes, Blob(limits.MAX_SMALL_FILE_BYTES)]


@message(Type.DONE)
class Done(Record):
    serial: Serial
    parts: Size


@message(Type.DURABLE)
class Durable(Record):
    serial: Serial
    version: Version
    bytes: Annotated[int, Integer(0, 2 * limits.MAX_STATE_BYTES)]
    changed: Size
    params: Size


@message(Type.ABORTED)
class Aborted(Record):
    serial: Serial
    reason: Reason


@message(Type.LIVE)
class Live(Record):
    engines: Annotated[Sequence[LiveEngine], AtMost(limits.MAX_ENGINES)]
    head: Version | None


# -- member and lead of an engine


@message(Type.ENGINE)
class Engine(Record):
    name: EngineName
    lead: Place | None
    members: Annotated[Sequence[Node], AtMost(limits.MAX_MEMBERS)] | None = None


@message(Type.MEMBER)
class Member(Record):
    engine: EngineName
    incarnation: Bytes16


@message(Type.HELD)
class Held(Record):
    version: Version | None
    still: bool
    round: Serial


@message(Type.WORKER_REPORT)
class WorkerReport(Record):
    report: Annotated[bytes, Blob(limits.MAX_INSTALL_REQUEST_BYTES)]
    age_us: Micros


@message(Type.FREEZE)
class Freeze(Record):
    version: Version | None
    round: Serial


@message(Type.SERVING)
class Serving(Record):
    version: Version | None
    ready: bool
