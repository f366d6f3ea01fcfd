"""Types of fields that several messages share. Each type states its constraint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.wire.constraints import AtMost, Binary, Blob, HostText, Integer, OneOf, PieceRanges, Text
from p2pcast.wire.protocol_versions import MAX_PROTOCOL

Node: TypeAlias = Annotated[bytes, Binary(16)]
RunId: TypeAlias = Annotated[bytes, Binary(16)]
ArtifactId: TypeAlias = Annotated[bytes, Binary(16)]
Bytes16: TypeAlias = Annotated[bytes, Binary(16)]
Bytes32: TypeAlias = Annotated[bytes, Binary(32)]
Certificate: TypeAlias = Annotated[bytes, Blob(limits.MAX_CERTIFICATE_BYTES)]
DurableRecord: TypeAlias = Annotated[bytes, Blob(limits.MAX_DURABLE_BYTES)]
Statement: TypeAlias = Annotated[bytes, Binary(limits.STATEMENT_BYTES)]

Host: TypeAlias = Annotated[str, HostText()]
Port: TypeAlias = Annotated[int, Integer(0, 65535)]
Name: TypeAlias = Annotated[str, Text(128)]
EngineName: TypeAlias = Annotated[str, Text(limits.MAX_SPAN_NAME)]
Reason: TypeAlias = Annotated[str, Text(1024)]

Protocol: TypeAlias = Annotated[int, Integer(0, MAX_PROTOCOL)]
Digest: TypeAlias = Annotated[int, Integer(0, (1 << 64) - 1)]
Serial: TypeAlias = Annotated[int, Integer(0, limits.MAX_STEP)]
Size: TypeAlias = Annotated[int, Integer(0, limits.MAX_STATE_BYTES)]
"""An artifact's size in bytes, or a number of things in a state: cells, parts, elements."""
Micros: TypeAlias = Annotated[int, Integer(0, (1 << 63) - 1)]
Stripe: TypeAlias = Annotated[int, Integer(0, limits.MAX_STRIPES - 1)]
StripeCount: TypeAlias = Annotated[int, Integer(1, limits.MAX_STRIPES)]
Epoch: TypeAlias = tuple[Annotated[int, Integer(0, 1 << 62)], Annotated[int, Integer(0, 1 << 62)]]

ArtifactKind: TypeAlias = Annotated[str, OneOf(("delta", "anchor"))]
Ranges: TypeAlias = Annotated[Sequence[int], PieceRanges()]
NodePath: TypeAlias = Annotated[Sequence[Node], AtMost(limits.MAX_PEERS)]
Address: TypeAlias = tuple[Host, Port]
AddressList: TypeAlias = Annotated[Sequence[Address], AtMost(limits.MAX_NODE_ADDRESSES)]


Place: TypeAlias = tuple[Node, Host, Port]
"""A node, and the address at which it listens."""
Places: TypeAlias = Annotated[Sequence[Place], AtMost(limits.MAX_PEERS)]
Route: TypeAlias = tuple[Node, bool, AddressList]
"""A node, whether the receiver can probably dial it, and its addresses."""
Wanted: TypeAlias = tuple[ArtifactId, Ranges]
"""An artifact that a child asks for, and the pieces of it that the child has."""
HandleProgress: TypeAlias = tuple[Annotated[int, Integer(0, 65535)], Annotated[int, Integer(0, limits.MAX_PIECES)]]
"""A handle, and how many pieces of its artifact the parent has."""
LiveEngine: TypeAlias = tuple[Annotated[str, Text(limits.MAX_ENGINE_NAME)], Version | None, bool]
"""An engine, its committed version, and whether the engine is ready."""
Missing: TypeAlias = tuple[ArtifactId, Node | None]
"""A sealed artifact for which a peer is still waiting, and the parent that has not sent it."""
CorruptSender: TypeAlias = tuple[Node, Annotated[int, Integer(1, 1 << 62)]]
"""A node, and how many of its pieces did not match their hash."""


class Offered(NamedTuple):
    """An artifact that a parent has or is receiving."""

    artifact: ArtifactId
    kind: ArtifactKind
    base: Version | None
    version: Version
    complete: bool


class Listed(NamedTuple):
    """An artifact in the hub's catalog."""

    artifact: ArtifactId
    kind: ArtifactKind
    base: Version | None
    version: Version
    size: Size
    layout: Bytes32
    state: Digest
    sealed: bool
    identity: Bytes32 | None
    """The version's hash."""
    durable: DurableRecord
