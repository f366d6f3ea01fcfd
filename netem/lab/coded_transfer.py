"""Encodes a state's changes in any format, sends them over one connection and decodes them. ``python -m
netem.lab.coded_transfer ROLE SETTINGS`` runs either end, with one coding thread.

p2pcast's formats are encoded cell by cell, so encoding, sending and decoding overlap; digests are computed and checked.
The other formats are encoded, sent and decoded as a whole, as in their own systems. For them, the bench's compiled scan
finds the changes, and nothing is hashed. Each format is decoded to positions and values (XOR to the words). Orders and
answers are lines of JSON, as in ``netem.broadcast.contenders``.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from netem.bench.codec_comparison import pulse_format, sparrowrl_format, xor_format
from netem.bench.codec_comparison.reference_scan import compact
from netem.broadcast.contenders import NOTSENT_LOWAT_BYTES
from netem.broadcast.json_lines import orders, write_facts
from p2pcast.codec.cell import decode, digest, encode
from p2pcast.codec.layout import Cell, Layout, Tensor

OURS: Final = ("context", "flat", "dense")
PORT: Final = 7096
FRAME: Final = struct.Struct("<IIQQI")
"""p2pcast's formats: cell, codec, digests before and after, payload bytes. Other formats: four zeros and the byte
count. The cell ``END`` ends the stream.
"""
END: Final = 0xFFFFFFFF
AHEAD: Final = 8
"""Coded cells that may wait for sending."""
ROOM_BYTES: Final = 1 << 20

Words = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class States:
    """The words before and after a step, each as one flat array in layout order."""

    layout: Layout
    old: Words
    new: Words
    known: tuple[int, ...]
    """Each cell's digest before the change."""

    @classmethod
    def read(cls, folder: Path) -> States:
        tensors = [
            Tensor(name, dtype, tuple(shape)) for name, dtype, shape in json.loads((folder / "layout.json").read_text())
        ]
        old, new = (np.load(folder / f"{name}.npy") for name in ("old", "new"))
        layout = Layout(tensors)
        states = cls(layout, old, new, ())
        return cls(layout, old, new, tuple(digest(states.of(cell, old), cell) for cell in layout.cells))

    def of(self, cell: Cell, words: Words) -> Words:
        start = self.layout.offsets[cell.tensor] // cell.word_bytes + cell.start
        return words[start : start + cell.words]

    def changes(self) -> pulse_format.Changes:
        """Return the changes per tensor, found by the bare scan."""
        found: pulse_format.Changes = []
        for number, tensor in enumerate(self.layout.tensors):
            start = self.layout.offsets[number] // tensor.word_bytes
            old, new = (words[start : start + tensor.words] for words in (self.old, self.new))
            room = np.empty(tensor.words, dtype=np.uint32)
            moved = room[: compact(old, new, room)].astype(np.int64)
            found.append((moved, new[moved]))
        return found


def write(folder: Path, layout: Layout, old: Words, new: Words) -> None:
    """Write the files that ``States.read`` reads."""
    (folder / "layout.json").write_text(json.dumps([[t.name, t.dtype, list(t.shape)] for t in layout.tensors]))
    np.save(folder / "old.npy", old)
    np.save(folder / "new.npy", new)


def frames(states: States, name: str) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Yield the frames to send in order, each as soon as it is encoded."""
    if name in OURS:
        for cell, known in zip(states.layout.cells, states.known, strict=True):
            old, new = states.of(cell, states.old), states.of(cell, states.new)
            if (coded := encode(cell, old, new, before=known, codec=name)) is not None:
                yield cell.index, coded.codec, coded.before, coded.after, coded.payload
        return
    yield 0, 0, 0, 0, _theirs(states, name)


def _theirs(states: States, name: str) -> bytes:
    if name == "xor + zstd-1":
        return xor_format.encode(states.old, states.new)
    changes = states.changes()
    if name == "sparrowrl":
        return sparrowrl_format.encode(changes)
    return pulse_format.encode_coo(changes, [t.shape for t in states.layout.tensors], int(name.rpartition("-")[2]))


def undo(states: States, name: str, frame: tuple[int, int, int, int], payload: bytes) -> None:
    index, codec, before, after = frame
    if name in OURS:
        cell = states.layout.cells[index]
        decode(cell, codec, payload, states.of(cell, states.old), before, after)
        return
    dtypes = [np.dtype(f"u{t.word_bytes}") for t in states.layout.tensors]
    if name == "xor + zstd-1":
        xor_format.decode(payload, states.old)
    elif name == "sparrowrl":
        sparrowrl_format.decode(payload, dtypes)
    else:
        pulse_format.decode_coo(payload, [t.shape for t in states.layout.tensors], dtypes)


def costs(states: States, name: str) -> dict[str, float]:
    """Return the single-core CPU time of a second round, and the bytes sent."""
    for _ in range(2):
        began = time.thread_time()
        made = list(frames(states, name))
        encoded = time.thread_time()
        for *frame, payload in made:
            undo(states, name, (frame[0], frame[1], frame[2], frame[3]), payload)
        decoded = time.thread_time()
    return {"encode_s": encoded - began, "decode_s": decoded - encoded, "bytes": sum(len(each[4]) for each in made)}


# -- the two ends


def sender(settings: dict[str, Any]) -> None:
    """Handle ``{"costs": format}``, ``{"connect": [host, port]}``, and ``{"send": format}``, which is answered with the
    start time.
    """
    states = States.read(Path(settings["folder"]))
    write_facts(ready=True)
    sock: socket.socket | None = None
    for order in orders():
        if "costs" in order:
            write_facts(costs=costs(states, order["costs"]))
        elif "connect" in order:
            sock = socket.create_connection(tuple(order["connect"]))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
            write_facts(connected=True)
        else:
            assert sock is not None
            began_s = time.time()
            with _line(partial(_put, sock)) as put:
                for *frame, payload in frames(states, order["send"]):
                    put(FRAME.pack(*frame, len(payload)) + payload)
                put(FRAME.pack(END, 0, 0, 0, 0))
            write_facts(began_s=began_s)


def receiver(settings: dict[str, Any]) -> None:
    """Handle ``{"receive": format}``, which is answered with the time at which decoding was complete."""
    states = States.read(Path(settings["folder"]))
    server = socket.create_server(("", PORT))
    write_facts(ready=True)
    sock: socket.socket | None = None
    for order in orders():
        if sock is None:
            sock, _ = server.accept()
        with _line(partial(_decode, states, order["receive"])) as put:
            while (header := _exactly(sock, FRAME.size)) and (frame := FRAME.unpack(header))[0] != END:
                put((frame[:4], _exactly(sock, frame[4])))
        write_facts(done_s=time.time())


def _put(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)


def _decode(states: States, name: str, item: tuple[tuple[int, int, int, int], bytes]) -> None:
    undo(states, name, item[0], item[1])


class _line:  # noqa: N801 - used like a function
    """A queue of at most AHEAD items, processed in order by one thread. Leaving the block waits for the last item."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        self._work = work
        self._queue: queue.Queue[Any] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Callable[[Any], None]:
        self._thread.start()
        return self._queue.put

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._work(item)


def _exactly(sock: socket.socket, size: int) -> bytes:
    room = bytearray(size)
    view = memoryview(room)
    while view:
        got = sock.recv_into(view[:ROOM_BYTES])
        if not got:
            raise SystemExit("the sender has closed the connection")
        view = view[got:]
    return bytes(room)


if __name__ == "__main__":
    {"sender": sender, "receiver": receiver}[sys.argv[1]](json.loads(sys.argv[2]))
