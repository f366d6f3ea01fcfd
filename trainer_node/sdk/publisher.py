"""``Publisher`` publishes the live tensors of a training process; each rank sends its own share.

    with Publisher("hub:7077", token_file="token", base="Qwen3-8B") as publisher:
        for step in range(1, steps):
            …                                                            # forward, backward
            handle = publisher.publish(step, model.named_parameters())   # on all ranks, in the same order
            …                                                            # work that does not change the weights
            handle.wait_snapshot()
            optimiser.step()

Guarantees: ``publish`` copies and returns. The version has the tensors' contents at the call of ``publish``; once
``wait_snapshot`` has returned, they may change. Threads compare, encode and send; a cell is sent while later ones are
still being compared. The hub stores a version whole, or not at all. No rank waits for a dead one: the hub informs the
others, whose waits raise RetryableError, and the next ``publish`` begins a new group. A Publisher uses
torch.distributed only when it is made, and to gather tensors with an unusual placement.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import blake3
import torch
from torch.distributed.tensor import DTensor

from p2pcast.artifact.signed_records import path_fault
from p2pcast.checkpoint.adapter_form import adapters_beside
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.cell import digest
from p2pcast.codec.kernel_warmup import warm_up, warm_up_for
from p2pcast.codec.layout import Layout, Tensor, cell_bytes
from p2pcast.ground.addresses import is_loopback
from p2pcast.ground.errors import P2PCastError, RetryableError, UsageError
from p2pcast.ground.limits import MAX_SMALL_FILE_BYTES, MAX_STEP
from p2pcast.ground.ordered_map import cores, ordered_map
from p2pcast.ground.version import Version
from p2pcast.ledger_api.trainer_certificate import TrainerCertificate, hub_address, join_token
from p2pcast.offline import state_digest
from p2pcast.sparse.budget_schedule import check_schedule
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from trainer_node.sdk.adapters import Adapters
from trainer_node.sdk.hub_connection import HubConnection, RanksJoined, Received
from trainer_node.sdk.process_group import ProcessGroup
from trainer_node.sdk.publication_handle import Handle
from trainer_node.sdk.send import SendPlan, send_parts
from trainer_node.sdk.shards import LocalShard, dealt, holding
from trainer_node.sdk.snapshot import Copy, Rooms, slots_for
from trainer_node.sdk.streamed_tensors import StreamedTensors, on_host
from trainer_node.sdk.tensors import TORCH_DTYPES, ExpectedTensors, LiveTensor, NamedTensors, Rename, fit, named

logger = logging.getLogger("p2pcast.publisher")

GROUP_BYTES = 16
GATHER_S = 60.0
"""How long all ranks have to reach the hub, in seconds."""
Found = TypeVar("Found")


class Publisher:
    """Publishes versions. All ranks of ``group`` make a Publisher and call ``publish`` in the same order. If ``group``
    is None, it is the default process group, or a single rank if torch.distributed is not initialised.

    ``hub``: HOST:PORT. The token is read from ``token_file``, or else from ``$P2PCAST_TOKEN``. ``base``: a Hugging Face
    folder, which decides names, shapes and dtypes, and whose small files are sent with the first version. If the hub's
    newest version is that state, the first version is a delta against it. ``dtype``: the dtype of floating tensors, if
    neither the base nor the hub decides. ``rename``: from the model's names (without wrappers' parts) to the
    checkpoint's. ``previous``: where to keep the last version's words of tensors on a GPU, which doubles the memory for
    this rank's share. For tensors on the CPU they are on the CPU. ``plaintext``: True for a hub on another machine that
    was started with --plaintext; other links are encrypted. A trainer on another machine needs a trainer's token
    (`p2pcast token create --role trainer`); a token for peers does not admit a publisher.

    ``adapter``: publish only LoRA adapters. Give a PEFT model, or a mapping from the name of each adapter to its
    configuration, as in ``adapter_config.json``. ``publish`` then takes these adapters' matrices from the tensors and
    leaves the base model out; ``base`` is then a folder of the adapters.

    ``with_adapter``: publish the model and LoRA adapters in one version; the values are those of ``adapter``.
    ``publish`` takes both from the tensors, under the names of a PEFT model, or under the model's names and
    ``ADAPTER/….lora_A.weight``. ``base`` is a folder of the model, which may contain the adapters in subfolders.

    To publish from one of several ranks, in a loop that gathers the tensors itself, pass a group of only that rank.

    Raises UsageError (also for an adapter whose rank differs from the run's), LocalError and IntegrityError (the base),
    RefusedError (the token), or RetryableError (the hub is out of reach, or not all ranks joined).
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
        adapter: Any = None,
        with_adapter: Any = None,
    ) -> None:
        # Collective work first: if one rank fails later, the others must not be left waiting in a collective call.
        self._world = ProcessGroup.of(group)
        self._drawn = self._world.draw(group, GROUP_BYTES)
        if previous not in ("gpu", "pinned"):
            raise UsageError(f"previous={previous!r}: it is 'gpu' or 'pinned'")
        if not dtype.is_floating_point:
            raise UsageError(
                f"dtype={dtype}: floating tensors stay floating; give torch.bfloat16 or another floating dtype"
            )
        self._adapters = _adapters(adapter, with_adapter)
        self._address = hub_address(hub)
        token = join_token(token_file)
        _check_links(token, self._address[0], plaintext)
        self._badge = TrainerCertificate(token)
        self._dtype = dtype
        self._rename = rename
        self._on_device = previous == "gpu"
        self._base = None if base is None else Checkpoint.open(Path(base))
        self._base_state: tuple[bytes, int] | None = None
        """The layout used to read the base, and the state's digest. Large folders are read only once."""
        self._files_due = self._adapters is not None
        """Whether the hub may not have the adapters' configurations yet."""
        self._workers = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        warm_up(level=logging.WARNING)
        self._calls = 0
        """Number of calls of ``publish``. It is the same on all ranks, so they can name the group of a new connection
        without communicating.
        """
        self._serial = 0
        """The serial of the next version on this connection."""
        self._sent_layout: bytes | None = None
        """The layout that was last sent over this connection."""
        self._plan: SendPlan | None = None
        self._version: Version | None = None
        """The version in ``plan.rooms.previous``; ``marks`` are its digests."""
        self._branch: int | None = None
        """The branch that this publisher opened by ``resume``."""
        self._marks: list[int] = []
        self._last: Handle | None = None
        self._closed = False
        self._uplink, ranked = self._connect()
        self.schedule = ranked.schedule
        """BLAKE3 hash of the sparse-attention schedule in the hub's newest version when this publisher connected; None
        if that version has no schedule.
        """
        try:
            self._known = self._tables(ranked)
            if self._adapters is not None:
                self._adapters.continue_with(self._known)
        except BaseException:
            self._hang_up()
            raise
        atexit.register(self._hang_up)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._hang_up()

    def publish(
        self,
        step: int,
        named_tensors: NamedTensors,
        *,
        streamed: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> Handle:
        """Begin a version of ``model.named_parameters()``, a state dict, or any names and tensors.

        Waits until the previous version is stored or aborted, starts the snapshot (see ``Handle.wait_snapshot``) and
        returns. If ``step`` is not greater than the newest version's, it opens a branch. Raises UsageError with every
        difference of names and shapes.

        ``streamed``: an iterator yields whole tensors one by one, for example by gathering them. Each is copied before
        the next is asked for, so it may then be freed or overwritten, and this rank never holds a second model. Every
        rank of the group gives all tensors. If there is no base, the first version's tensors are collected on the host.

        ``files``: small files to add in this version, by path; those of earlier versions stay. Only rank 0's are used.
        """
        return self._begin(step, named_tensors, resume=False, streamed=streamed, files=files)

    def resume(
        self,
        step: int,
        named_tensors: NamedTensors,
        *,
        streamed: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> Handle:
        """Like ``publish``, but always opens a branch: call it after a crash, to leave behind the versions published
        after the restored checkpoint. Once a different trainer has opened a later branch, versions fail with
        RefusedError.
        """
        return self._begin(step, named_tensors, resume=True, streamed=streamed, files=files)

    @property
    def newest(self) -> Version | None:
        """The newest version this publisher knows: the hub's when it connected, or one that it has published since."""
        received = self._uplink.received
        head = None if received.ranked is None else received.ranked.head
        stored = [durable.version for durable in received.durable.values()]
        return max((*stored, *([] if head is None else [head])), default=None)

    def newest_is_base(self) -> bool | None:
        """Whether the hub's newest version is the base folder's state, which is read in full. None if there is no base
        or no version, or if their tensors differ.
        """
        ranked = self._uplink.received.ranked
        if self._base is None or ranked is None or ranked.state is None or self._hub_layout is None:
            return None
        return (
            self._is_base(self._hub_layout, ranked.state)
            if self._base.layout().tensors == self._hub_layout.tensors
            else None
        )

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of the adapters next to the model in the hub's newest version, when this publisher connected."""
        return () if self._hub_layout is None else adapters_beside([one.name for one in self._hub_layout.tensors])

    def close(self) -> None:
        """Wait until the last version is stored or aborted, and close the connection."""
        if self._last is not None and not self._closed:
            self._last.wait_over()
        self._hang_up(in_peace=True)

    def _hang_up(self, *, in_peace: bool = False) -> None:
        """Close at once. A version that is not stored yet is aborted."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._hang_up)
            self._uplink.close(in_peace=in_peace)

    # -- in the caller's thread

    def _begin(
        self,
        step: int,
        named_tensors: NamedTensors,
        *,
        resume: bool,
        streamed: bool,
        files: Mapping[str, bytes] | None,
    ) -> Handle:
        if self._closed:
            raise UsageError("this publisher is closed")
        if self._last is not None:
            self._last.wait_over()
        self._calls += 1
        handle = self._last = Handle(step)
        try:
            if not 0 <= step <= MAX_STEP:
                raise UsageError(f"step {step} is out of range")
            sent_files = _checked_files(files or {})
            live = named(named_tensors, self._rename)
            if self._adapters is not None:
                live = self._adapters.select(live)
            plan = self._prepare_streamed(live) if streamed else self._prepare(list(live))
        except BaseException as error:
            self._give_up(handle, error)
            raise
        # A daemon thread, so that a training process that fails elsewhere can exit; its version is then aborted.
        threading.Thread(
            target=self._work, args=(handle, plan, resume, sent_files), name=f"p2pcast publish {step}", daemon=True
        ).start()
        return handle

    def _prepare(self, live: list[LiveTensor], cuda: torch.device | None = None) -> SendPlan:
        """Return the plan for these tensors, and begin the snapshot. ``cuda``: their device, if it is known already."""
        pairs = fit(live, self._known, self._dtype)
        cuda = cuda or _device([one for one, _ in pairs])
        plan = self._use(self._plan_for(cuda, [(tensor, one.tensor) for one, tensor in pairs]))
        tensors = {tensor.name: one for one, tensor in pairs}
        pieces = _pieces(plan)
        copies: list[Copy] = []
        for number, held in enumerate(plan.holdings):
            name = plan.layout.tensors[number].name
            if held.gather and self._world.rank in held.holders:
                copies.append(Copy(_gatherer(tensors[name].tensor), pieces.get(name, []), at_once=True))
            elif name in pieces:
                copies.append(Copy(tensors[name].local, pieces[name]))
        plan.rooms.begin(copies, cuda)
        return plan

    def _prepare_streamed(self, live: Iterator[LiveTensor]) -> SendPlan:
        """Return the plan for the tables' tensors, and take the snapshot as the tensors come."""
        first = next(live, None)
        cuda = None if first is None else _device([first])
        if not self._known or self._known[0].besides:
            return self._prepare([] if first is None else [on_host(one) for one in chain([first], live)], cuda)
        plan = self._plan_for(cuda, [(tensor, None) for tensor in self._known[0].tensors.values()])
        plan.rooms.begin([], cuda)
        streamed = StreamedTensors(plan.rooms, _pieces(plan), self._known, cuda)
        while first is not None:
            streamed.take(first)
            # The next tensor may need the memory of this one.
            first = None
            first = next(live, None)
        streamed.finish()
        return self._use(plan)

    def _plan_for(self, cuda: torch.device | None, tensors: list[tuple[Tensor, torch.Tensor | None]]) -> SendPlan:
        """Return the last plan, or a new one if the tensors or their placement changed. ``tensors``: each expected
        tensor with the live one, or with None for a whole tensor on every rank.
        """
        key = (cuda, sorted((tensor.name, tensor.dtype, tensor.shape, _placing(live)) for tensor, live in tensors))
        if self._plan is not None and self._plan.key == key:
            return self._plan
        layout = self._layout(Layout(tensor for tensor, _ in tensors))
        lives = {tensor.name: live for tensor, live in tensors}
        holdings = [holding(lives[t.name], self._world.numbers) for t in layout.tensors]
        return self._planned(key, layout, holdings, cuda)

    def _use(self, plan: SendPlan) -> SendPlan:
        if plan is not self._plan:
            # The words kept for a different plan cannot be used.
            self._plan, self._version, self._marks = plan, None, []
        return plan

    def _planned(self, key: Any, layout: Layout, holdings: list[LocalShard], cuda: torch.device | None) -> SendPlan:
        parts = dealt(layout, holdings, self._world.rank)
        dtypes = [TORCH_DTYPES[t.dtype] for t in layout.tensors]
        slots, segments = slots_for([(p.cell.words, p.cell.word_bytes, dtypes[p.cell.tensor]) for p in parts])
        rooms = Rooms(
            slots, segments, cuda if self._on_device else None, pinned=cuda is not None and not self._on_device
        )
        return SendPlan(key, layout, holdings, parts, rooms)

    def _layout(self, layout: Layout) -> Layout:
        """Return the hub's layout, with its cells, if it has the same tensors; else ``layout``."""
        return (
            self._hub_layout if self._hub_layout is not None and self._hub_layout.tensors == layout.tensors else layout
        )

    def _tables(self, ranked: RanksJoined) -> list[ExpectedTensors]:
        """The tables that live tensors have to match; the first decides dtypes. Tables that do not contain the adapters
        come last: a base, or the hub's newest version before the first with adapters.
        """
        self._hub_layout = None
        beside = () if self._adapters is None else self._adapters.beside
        out: list[ExpectedTensors] = []
        if self._base is not None:
            out.append(ExpectedTensors.of(f"the base {self._base.folder}", self._base.layout().tensors, beside))
        if ranked.document is not None:
            self._hub_layout = Layout.from_document(ranked.document, ranked.layout)
            out.append(ExpectedTensors.of(f"the hub's newest version {ranked.head}", self._hub_layout.tensors, beside))
        return sorted(out, key=lambda table: bool(table.besides))

    # -- connection

    def _connect(self) -> tuple[HubConnection, RanksJoined]:
        world = self._world
        group = blake3.blake3(self._drawn + self._calls.to_bytes(8, "little")).digest(length=GROUP_BYTES)
        uplink = HubConnection(self._address, self._badge, f"{socket.gethostname()} rank {world.rank}")
        ranked = uplink.open(group, world.rank, world.ranks, GATHER_S)
        self._serial, self._sent_layout = 0, ranked.layout
        return uplink, ranked

    def _connected(self) -> HubConnection:
        """Return the connection, or a new one if it closed because the hub was restarted or a rank was lost."""
        if self._uplink.over and not self._closed:
            self._uplink.close()
            self._uplink, _ = self._connect()
        return self._uplink

    def _give_up(self, handle: Handle, error: BaseException) -> None:
        """Abandon the version: this rank sends nothing more for it, so the others must not wait for it."""
        _abandon(self._uplink, self._serial, error)
        self._serial += 1
        handle.finish(error)

    # -- in a thread

    def _work(self, handle: Handle, plan: SendPlan, resume: bool, files: Mapping[str, bytes]) -> None:
        try:
            plan.rooms.finish()
            handle.taken()
        except BaseException as error:  # noqa: BLE001 - the handle raises it in the waiting thread
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
            self._deliver(handle, uplink, serial, plan, resume, files)
        except BaseException as error:  # noqa: BLE001
            if serial not in uplink.received.aborted:
                _abandon(uplink, serial, error)
            handle.finish(error)
        else:
            handle.finish()

    def _deliver(
        self,
        handle: Handle,
        uplink: HubConnection,
        serial: int,
        plan: SendPlan,
        resume: bool,
        files: Mapping[str, bytes],
    ) -> None:
        layout = plan.layout
        first = self._world.rank == 0
        if self._sent_layout != layout.layout_id:
            warm_up_for(layout, logging.WARNING)
            if first:
                uplink.send(messages.Layout(layout.layout_id, layout.document))
            self._sent_layout = layout.layout_id
        uplink.send(messages.Begin(serial, handle.step, layout.layout_id, resume, None if resume else self._branch))
        self._take_base(plan, uplink)
        begun = self._answer(handle, uplink, serial, lambda received: received.begun.get(serial))
        handle.begun(begun.version)
        if resume or self._branch is not None:
            self._branch = begun.version.branch
        coded = begun.base is not None and begun.base == self._version
        marks, sent = send_parts(uplink, serial, plan, begun.codec if coded else None, self._marks, self._workers)
        if first:
            for path, contents in {**self._small_files(begun.base), **files}.items():
                uplink.send(messages.File(serial=serial, path=path, contents=contents), len(contents))
        uplink.send(messages.Done(serial, sent))
        handle.durable = self._answer(handle, uplink, serial, lambda received: received.durable.get(serial))
        self._files_due = False
        plan.rooms.keep()
        self._version, self._marks = handle.durable.version, marks
        # Later versions must have the tensors of the first, so that a forgotten tensor is an error.
        if not self._known or self._known[0].besides:
            self._known = [ExpectedTensors.of(f"version {self._version}", layout.tensors), *self._known]

    def _small_files(self, base: Version | None) -> dict[str, bytes]:
        """The small files to send with a version whose delta leads from ``base``; the base's other files stay."""
        configs = self._adapters.files if self._adapters is not None and self._files_due else {}
        of_folder = self._base.small_files() if self._base is not None and base is None else {}
        return of_folder | configs

    def _answer(
        self, handle: Handle, uplink: HubConnection, serial: int, find: Callable[[Received], Found | None]
    ) -> Found:
        """Wait for the hub's next message about this version. Raises RetryableError if the version was aborted."""

        def answer_in(received: Received) -> tuple[Found | None, str] | None:
            if serial in received.aborted:
                return None, received.aborted[serial]
            found = find(received)
            return None if found is None else (found, "")

        answer = uplink.wait(answer_in)
        assert answer is not None
        found, reason = answer
        if found is None:
            raise RetryableError(f"step {handle.step} was not published: {reason}")
        return found

    def _is_base(self, layout: Layout, state: int) -> bool:
        """Whether the state with this digest is the base folder's."""
        assert self._base is not None
        if self._base_state is None or self._base_state[0] != layout.layout_id:
            self._base_state = layout.layout_id, state_digest(self._base, layout)
        return self._base_state[1] == state

    def _take_base(self, plan: SendPlan, uplink: HubConnection) -> None:
        """If the hub's newest version is the base folder's state, load this rank's share as the previous state."""
        ranked = uplink.received.ranked
        if self._base is None or self._version is not None or ranked is None or ranked.state is None:
            return
        base = self._base
        if base.layout().tensors != plan.layout.tensors or not self._is_base(plan.layout, ranked.state):
            return
        cells = [part.cell for part in plan.parts]
        plan.rooms.fill_previous(lambda number: base.lent(cells[number]))
        self._marks = list(
            ordered_map(
                lambda cell: digest(base.lent(cell), cell), cells, workers=self._workers, name="base", nbytes=cell_bytes
            )
        )
        self._version = ranked.head


def _adapters(alone: Any, beside: Any) -> Adapters | None:
    """Return the chosen adapters, or None. Raises UsageError if both arguments are given."""
    if alone is not None and beside is not None:
        raise UsageError("adapter= publishes adapters alone, with_adapter= a model with adapters beside it: give one")
    if beside is not None:
        return Adapters(beside, beside=True)
    return None if alone is None else Adapters(alone)


def _checked_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    for path, contents in files.items():
        if fault := path_fault(path):
            raise UsageError(f"files: {fault}")
        if len(contents) > MAX_SMALL_FILE_BYTES:
            raise UsageError(f"files: {path!r} has {len(contents)} bytes; at most {MAX_SMALL_FILE_BYTES} are allowed")
    check_schedule(files)
    return dict(files)


def _device(live: Sequence[LiveTensor]) -> torch.device | None:
    """The tensors' CUDA device, or None for the host. Raises UsageError for several devices: a snapshot copies on one
    device's stream.
    """
    found = sorted({str(one.tensor.device) for one in live if one.tensor.device.type == "cuda"})
    if len(found) > 1:
        raise UsageError(f"tensors lie on {', '.join(found)}: a rank publishes tensors of one CUDA device")
    return torch.device(found[0]) if found else None


def _pieces(plan: SendPlan) -> dict[str, Sequence[tuple[int, int]]]:
    """For each tensor name, the slots that this rank fills from the tensor, with the first word of each."""
    pieces: dict[str, list[tuple[int, int]]] = {}
    for number, part in enumerate(plan.parts):
        pieces.setdefault(plan.layout.tensors[part.cell.tensor].name, []).append((number, part.source))
    return dict(pieces)


def _placing(tensor: torch.Tensor | None) -> str:
    return f"{tensor.device_mesh} {tensor.placements}" if isinstance(tensor, DTensor) else ""


def _gatherer(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that gathers the tensor. It is collective among all ranks that hold a shard."""

    def gather() -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor()

    return gather


def _abandon(uplink: HubConnection, serial: int, error: BaseException) -> None:
    """Give the version up. Never raises, because another thread waits for the version's handle."""
    try:
        uplink.abandon(serial, _reason(error))
    except Exception:
        logger.exception("the hub could not be told of an abandoned version")


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, P2PCastError) else f"{type(error).__name__}: {error}"


def _check_links(token: JoinToken, host: str, plaintext: bool) -> None:
    """Raises UsageError if ``plaintext`` contradicts the token."""
    if token.authority and plaintext:
        raise UsageError("this token's hub encrypts its links: leave plaintext=True out")
    if not token.authority and not plaintext and not (is_loopback(host) or host == "localhost"):
        raise UsageError(
            f"this token's hub was started with --plaintext: say plaintext=True if the network to {host} is closed to"
            " others, or start it without"
        )
