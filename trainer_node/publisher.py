"""``Publisher``: a training process publishes its live tensors, each rank what it owns.

    with Publisher("hub:7077", token_file="token", base="Qwen3-8B") as publisher:
        for step in range(1, steps):
            …                                                            # forward, backward
            handle = publisher.publish(step, model.named_parameters())   # on all ranks, in the same order
            …                                                            # whatever leaves the weights alone
            handle.wait_snapshot()
            optimiser.step()

Promises: ``publish`` copies and returns; once ``wait_snapshot`` has returned the tensors may change, and the version is what they held. Comparing, coding and
sending go on in threads, a cell goes out while later ones are still being compared. A version is at the hub whole, or nowhere. No rank waits for one that died:
the hub tells the others, whose waits raise RetryableError, and the next ``publish`` begins anew. torch.distributed is used when a Publisher is made, and to
gather tensors that are placed in an unusual way; for nothing else.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import blake3
import torch
from torch.distributed.tensor import DTensor

from p2pcast.addresses import is_loopback, parse_address
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.cell import digest
from p2pcast.codec.layout import Layout
from p2pcast.codec.warm import warm_up, warm_up_for
from p2pcast.errors import P2PCastError, RetryableError, UsageError
from p2pcast.limits import MAX_STEP
from p2pcast.offline import state_digest
from p2pcast.parallel import cores, ordered_map
from p2pcast.version import Version
from p2pcast.wire.messages import Type
from p2pcast.wire.token import Token
from trainer_node.badge import Badge
from trainer_node.handle import Handle
from trainer_node.sending import Plan, send_parts
from trainer_node.shards import Holding, dealt, holding
from trainer_node.snapshot import Copy, Rooms, slots_for
from trainer_node.tensors import TORCH_DTYPES, Known, Live, NamedTensors, Rename, fit, named
from trainer_node.uplink import Heard, Ranked, Uplink
from trainer_node.world import World

logger = logging.getLogger("p2pcast.publisher")

DEFAULT_PORT = 7077
TOKEN_VARIABLE = "P2PCAST_TOKEN"
GROUP_BYTES = 16
GATHER_S = 60.0
"""For all ranks to reach the hub."""
Found = TypeVar("Found")


class Publisher:
    """All ranks of ``group`` (None: of the default process group; without torch.distributed there is one rank) make one, and call ``publish`` in the same order.

    ``hub``: HOST:PORT. The token comes from ``token_file``, else from ``$P2PCAST_TOKEN``. ``base``: a Hugging Face folder; it decides names, shapes and dtypes, its
    small files go with the first version, and if the hub's newest version is that state, the first version is a delta against it. ``dtype``: what floating tensors
    become where neither base nor hub says. ``rename``: from names as the model has them (wrappers' parts taken out) to names of the checkpoint. ``previous``: where
    the last version's words are kept when tensors are on a GPU, 1 × this rank's share twice over; tensors on the CPU have theirs on the CPU. ``plaintext`` must be
    said for a hub that was started with --plaintext and is not on this machine; any other's links are encrypted. From another machine it takes a trainer's token
    (`p2pcast token create --role trainer`): one for peers does not admit who publishes.

    To publish from one rank of several, as a loop that gathers by itself may want to, give ``group`` a group of that rank alone.

    Raises UsageError, LocalError and IntegrityError (the base), RefusedError (the token), RetryableError (the hub is out of reach, or not all ranks came).
    """

    def __init__(
        self,
        hub: str,
        *,
        token_file: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        group: Any = None,
        rename: Rename | None = None,
        previous: Literal["gpu", "pinned"] = "gpu",
        plaintext: bool = False,
    ) -> None:
        # First what all ranks do together: an error further down on one of them must not leave the others waiting in it.
        self._world = World.of(group)
        self._drawn = self._world.draw(group, GROUP_BYTES)
        if previous not in ("gpu", "pinned"):
            raise UsageError(f"previous={previous!r}: it is 'gpu' or 'pinned'")
        if not dtype.is_floating_point:
            raise UsageError(f"dtype={dtype}: floating tensors stay floating; give torch.bfloat16 or another floating dtype")
        self._address = _address(hub)
        token = _token(None if token_file is None else Path(token_file))
        _check_links(token, self._address[0], plaintext)
        self._badge = Badge(token)
        self._dtype = dtype
        self._rename = rename
        self._on_device = previous == "gpu"
        self._base = None if base is None else Checkpoint.open(Path(base))
        self._workers = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        warm_up()
        self._calls = 0
        """How often ``publish`` was called: the same on all ranks, so a new connection's group can be named without asking anybody."""
        self._serial = 0
        """Of the next version on this connection."""
        self._told: bytes | None = None
        """The layout that the hub has from this connection."""
        self._plan: Plan | None = None
        self._version: Version | None = None
        """The version that ``plan.rooms.previous`` is, and ``marks`` are digests of."""
        self._marks: list[int] = []
        self._last: Handle | None = None
        self._closed = False
        self._uplink, ranked = self._connect()
        self._known = self._tables(ranked)
        atexit.register(self._hang_up)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._hang_up()

    def publish(self, step: int, named_tensors: NamedTensors) -> Handle:
        """Begin a version: ``model.named_parameters()``, a state dict, or any names and tensors.

        Waits until the version before is stored or aborted, takes the snapshot (see ``Handle.wait_snapshot``) and returns. ``step`` not greater than the newest
        version's opens a branch. Raises UsageError listing every difference of names and shapes.
        """
        return self._begin(step, named_tensors, resume=False)

    def resume(self, step: int, named_tensors: NamedTensors) -> Handle:
        """As ``publish``, after a crash: always opens a branch, so that what was published before and is no longer true is left behind."""
        return self._begin(step, named_tensors, resume=True)

    def close(self) -> None:
        """Wait until the last version is stored or aborted, and end the connection."""
        if self._last is not None and not self._closed:
            self._last.wait_over()
        self._hang_up(in_peace=True)

    def _hang_up(self, *, in_peace: bool = False) -> None:
        """At once: a version that is not stored yet is aborted."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._hang_up)
            self._uplink.close(in_peace=in_peace)

    # -- in the caller's thread

    def _begin(self, step: int, named_tensors: NamedTensors, *, resume: bool) -> Handle:
        if self._closed:
            raise UsageError("this publisher is closed")
        if self._last is not None:
            self._last.wait_over()
        self._calls += 1
        handle = self._last = Handle(step)
        try:
            if not 0 <= step <= MAX_STEP:
                raise UsageError(f"step {step} is out of range")
            plan = self._prepare(named(named_tensors, self._rename))
        except BaseException as error:
            self._give_up(handle, error)
            raise
        # A daemon, so that a training process that fails elsewhere can end; what it was publishing is then aborted.
        threading.Thread(target=self._work, args=(handle, plan, resume), name=f"p2pcast publish {step}", daemon=True).start()
        return handle

    def _prepare(self, live: list[Live]) -> Plan:
        """The plan for these tensors, with the snapshot begun."""
        pairs = fit(live, self._known, self._dtype)
        cuda = next((one.tensor.device for one, _ in pairs if one.tensor.device.type == "cuda"), None)
        key = (cuda, sorted((tensor.name, tensor.dtype, tensor.shape, _placing(one.tensor)) for one, tensor in pairs))
        tensors = {tensor.name: one for one, tensor in pairs}
        if self._plan is None or self._plan.key != key:
            # What was kept of another plan does not fit.
            self._plan, self._version, self._marks = None, None, []
            layout = self._layout(Layout(tensor for _, tensor in pairs))
            holdings = [holding(tensors[t.name].tensor, self._world.numbers) for t in layout.tensors]
            self._plan = self._planned(key, layout, holdings, cuda)
        plan = self._plan
        pieces: dict[int, list[tuple[int, int]]] = {}
        for number, part in enumerate(plan.parts):
            pieces.setdefault(part.cell.tensor, []).append((number, part.source))
        copies: list[Copy] = []
        for number, held in enumerate(plan.holdings):
            one = tensors[plan.layout.tensors[number].name]
            if held.gather and self._world.rank in held.holders:
                copies.append(Copy(_gatherer(one.tensor), pieces.get(number, []), at_once=True))
            elif number in pieces:
                copies.append(Copy(one.local, pieces[number]))
        plan.rooms.begin(copies, cuda)
        return plan

    def _planned(self, key: Any, layout: Layout, holdings: list[Holding], cuda: torch.device | None) -> Plan:
        parts = dealt(layout, holdings, self._world.rank)
        dtypes = [TORCH_DTYPES[t.dtype] for t in layout.tensors]
        slots, segments = slots_for([(p.cell.words, p.cell.word_bytes, dtypes[p.cell.tensor]) for p in parts])
        rooms = Rooms(slots, segments, cuda if self._on_device else None, pinned=cuda is not None and not self._on_device)
        return Plan(key, layout, holdings, parts, rooms)

    def _layout(self, layout: Layout) -> Layout:
        """Cut into cells as the hub's is, where the tensors are the same."""
        return self._hub_layout if self._hub_layout is not None and self._hub_layout.tensors == layout.tensors else layout

    def _tables(self, ranked: Ranked) -> list[Known]:
        """What live tensors have to match; the first decides dtypes."""
        self._hub_layout = None
        out: list[Known] = []
        if self._base is not None:
            out.append(Known.of(f"the base {self._base.folder}", self._base.layout().tensors))
        if ranked.document is not None:
            self._hub_layout = Layout.from_document(ranked.document, ranked.layout)
            out.append(Known.of(f"the hub's newest version {ranked.head}", self._hub_layout.tensors))
        return out

    # -- connection

    def _connect(self) -> tuple[Uplink, Ranked]:
        world = self._world
        group = blake3.blake3(self._drawn + self._calls.to_bytes(8, "little")).digest(length=GROUP_BYTES)
        uplink = Uplink(self._address, self._badge, f"{socket.gethostname()} rank {world.rank}")
        ranked = uplink.open(group, world.rank, world.ranks, GATHER_S)
        self._serial, self._told = 0, ranked.layout
        return uplink, ranked

    def _connected(self) -> Uplink:
        """The connection, made anew if it is over: the hub was restarted, or a rank was lost and is back."""
        if self._uplink.over and not self._closed:
            self._uplink.close()
            self._uplink, _ = self._connect()
        return self._uplink

    def _give_up(self, handle: Handle, error: BaseException) -> None:
        """This rank has nothing to send for this version: the others must not wait for it."""
        _abandon(self._uplink, self._serial, error)
        self._serial += 1
        handle.finish(error)

    # -- in a thread

    def _work(self, handle: Handle, plan: Plan, resume: bool) -> None:
        try:
            plan.rooms.finish()
            handle.taken()
        except BaseException as error:  # noqa: BLE001  # whatever it is, somebody waits for the handle, and will raise it
            self._give_up(handle, error)
            return
        try:
            uplink = handle.uplink = self._connected()
        except BaseException as error:  # noqa: BLE001
            handle.finish(error)
            return
        serial = self._serial
        self._serial += 1
        try:
            self._deliver(handle, uplink, serial, plan, resume)
        except BaseException as error:  # noqa: BLE001
            if serial not in uplink.heard.aborted:
                _abandon(uplink, serial, error)
            handle.finish(error)
        else:
            handle.finish()

    def _deliver(self, handle: Handle, uplink: Uplink, serial: int, plan: Plan, resume: bool) -> None:
        layout = plan.layout
        first = self._world.rank == 0
        if self._told != layout.layout_id:
            warm_up_for(layout)
            if first:
                uplink.send(Type.LAYOUT, {"layout": layout.layout_id, "document": layout.document})
            self._told = layout.layout_id
        uplink.send(Type.BEGIN, {"serial": serial, "step": handle.step, "layout": layout.layout_id, "resume": resume})
        self._take_base(plan, uplink)
        begun = self._answer(handle, uplink, serial, lambda heard: heard.begun.get(serial))
        handle.version = begun.version
        coded = begun.base is not None and begun.base == self._version
        marks, sent = send_parts(uplink, serial, plan, begun.codec if coded else None, self._marks, self._workers)
        if first and begun.base is None and self._base is not None:
            for path, contents in self._base.small_files().items():
                uplink.send(Type.FILE, {"serial": serial, "path": path, "contents": contents}, len(contents))
        uplink.send(Type.DONE, {"serial": serial, "parts": sent})
        handle.durable = self._answer(handle, uplink, serial, lambda heard: heard.durable.get(serial))
        plan.rooms.keep()
        self._version, self._marks = handle.durable.version, marks
        # What has been published once is what the next must be: a tensor that was forgotten does not begin another model.
        self._known = self._known or [Known.of(f"version {self._version}", layout.tensors)]

    def _answer(self, handle: Handle, uplink: Uplink, serial: int, look: Callable[[Heard], Found | None]) -> Found:
        """What the hub says next of this version. Raises RetryableError when it says that there will be none."""

        def heard_of(heard: Heard) -> tuple[Found | None, str] | None:
            if serial in heard.aborted:
                return None, heard.aborted[serial]
            found = look(heard)
            return None if found is None else (found, "")

        answer = uplink.wait(heard_of)
        assert answer is not None
        found, reason = answer
        if found is None:
            raise RetryableError(f"step {handle.step} was not published: {reason}")
        return found

    def _take_base(self, plan: Plan, uplink: Uplink) -> None:
        """Where the hub's newest version is the base folder's state, this rank's share of it is the previous state."""
        ranked = uplink.heard.ranked
        if self._base is None or self._version is not None or ranked is None or ranked.state is None:
            return
        base = self._base
        if base.layout().tensors != plan.layout.tensors or state_digest(base, plan.layout) != ranked.state:
            return
        cells = [part.cell for part in plan.parts]
        plan.rooms.fill_previous(lambda number: base.lent(cells[number]))
        self._marks = list(ordered_map(lambda cell: digest(base.lent(cell), cell), cells, workers=self._workers, name="base"))
        self._version = ranked.head


def _placing(tensor: torch.Tensor) -> str:
    return f"{tensor.device_mesh} {tensor.placements}" if isinstance(tensor, DTensor) else ""


def _gatherer(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Collective, on all ranks that hold a shard of it."""

    def gather() -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor()

    return gather


def _abandon(uplink: Uplink, serial: int, error: BaseException) -> None:
    """Never fails: somebody waits for the version's handle."""
    try:
        uplink.abandon(serial, _reason(error))
    except Exception:
        logger.exception("the hub could not be told that a version comes to nothing")


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, P2PCastError) else f"{type(error).__name__}: {error}"


def _address(hub: str) -> tuple[str, int]:
    return parse_address(hub, default_host="127.0.0.1", default_port=DEFAULT_PORT)


def _check_links(token: Token, host: str, plaintext: bool) -> None:
    """Raises UsageError."""
    if token.authority and plaintext:
        raise UsageError("this token's hub encrypts its links: leave plaintext=True out")
    if not token.authority and not plaintext and not (is_loopback(host) or host == "localhost"):
        raise UsageError(
            f"this token's hub was started with --plaintext: say plaintext=True if the network to {host} is closed to others, or start it without"
        )


def _token(file: Path | None) -> Token:
    """Never repeats it. Raises UsageError."""
    if file is None:
        text = os.environ.get(TOKEN_VARIABLE, "")
        if not text:
            raise UsageError(
                f"a join token is needed: token_file (as `p2pcast seed --token-file` wrote it), or ${TOKEN_VARIABLE}"
            )
        return Token.parse(text)
    try:
        return Token.parse(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the token file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not a token file") from None
