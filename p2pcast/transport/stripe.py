"""One connection on the event loop: the asyncio wrapper of ``wire.connection.Connection``.

Guarantees: payload is read into the buffer from which the piece is forwarded. A stripe takes no piece while
WRITE_HIGH_BYTES are queued, so the next piece goes to a stripe that can send now. Every error leads to exactly one call
of ``on_closed``. A closed stripe frees its memory at once, without garbage collection of cycles: collection is rare in
a process with many objects, and a flood of connections would fill the memory first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

from p2pcast.ground.addresses import plain_host
from p2pcast.ground.errors import P2PCastError, RemoteError, RetryableError
from p2pcast.ground.limits import KIB
from p2pcast.transport.socket_options import Sockets, gather, pace, set_close_timeout, unsent_bytes
from p2pcast.transport.tcp_info import TcpInfo, read
from p2pcast.transport.tls_errors import explain, record_certificate
from p2pcast.wire.connection import Connection, Established, Event

HANDSHAKE_S = 10.0
"""Time limit in seconds for a connection's handshake."""
WRITE_HIGH_BYTES = 128 * KIB
"""A stripe gets no further piece while this many bytes are queued for it in user space: two 64 KiB pieces."""
WRITE_LOW_BYTES = 64 * KIB
CLOSE_S = 10.0
"""Seconds that the other side has to read queued bytes after a close without an error."""

GATHER_LEAST_BYTES, GATHER_MOST_BYTES = 4 * KIB, 64 * KIB
"""Range of SO_RCVLOWAT: fewer bytes are not worth the system call; more would leave no space in the receive buffer."""
RECORD_BYTES = 16 * KIB
"""Most bytes of an incomplete TLS record that have been read: the kernel may have that many fewer to deliver."""

DEFAULT = Sockets()


class StripeOwner(Protocol):
    def on_established(self, stripe: Stripe, event: Established) -> None: ...
    def on_event(self, stripe: Stripe, event: Event) -> None: ...
    def on_read(self, stripe: Stripe, payload_bytes: int) -> None: ...
    def on_writable(self, stripe: Stripe) -> None: ...
    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None: ...


class Stripe(asyncio.BufferedProtocol):
    def __init__(
        self,
        connection: Connection,
        owner: StripeOwner,
        *,
        sockets: Sockets = DEFAULT,
        handshake_s: float = HANDSHAKE_S,
        on_made: Callable[[Stripe], None] | None = None,
    ) -> None:
        """``on_made``: called once there is a transport (with TLS: after its handshake)."""
        self.connection = connection
        self.owner = owner
        self._sockets = sockets
        self._handshake_s = handshake_s
        self._on_made = on_made
        self.number = 0
        self.writable = False
        self.remote_address: tuple[str, int] = ("", 0)
        self.own_host = ""
        """This machine's address on the connection."""
        self._transport: asyncio.Transport | None = None
        """None again once the connection is lost, to break a reference cycle with TLS."""
        self._error: P2PCastError | None = None
        self._established = False
        self._closed = False
        self._deadline: asyncio.TimerHandle | None = None
        self._pace: int | None = None
        self._opaque = 0
        self._gathers = self._has_read = False
        self._low = 1
        self._descriptor = -1

    @property
    def acked_bytes(self) -> int:
        """Sent bytes that the other side's kernel has acknowledged; 0 if unknown."""
        info = self.info()
        return 0 if info is None else info.acked_bytes

    @property
    def socket(self) -> Any:
        """The socket; None before the connection is made and after it has ended."""
        return None if self._closed or self._transport is None else self._transport.get_extra_info("socket")

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were written to this stripe and have not been sent."""
        if self._transport is None or self._descriptor < 0:
            return 0
        return self._transport.get_write_buffer_size() + unsent_bytes(self._descriptor)

    @property
    def certificate(self) -> bytes | None:
        """The other side's certificate (DER); None without TLS, and after the connection has ended."""
        tls = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        return None if tls is None else tls.getpeercert(binary_form=True)

    def info(self) -> TcpInfo | None:
        """Return the kernel's figures for this connection; None if unknown."""
        return read(self.socket)

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.remote_address = (plain_host(str(peer[0])), int(peer[1]))
            self.own_host = plain_host(str(transport.get_extra_info("sockname")[0]))
        if (sock := transport.get_extra_info("socket")) is not None:
            self._descriptor = sock.fileno()
            self._sockets.tune(sock)
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self._opaque = RECORD_BYTES
            try:
                record_certificate(self.connection, tls)
            except P2PCastError as error:
                self.abort(error)
                return
        self._deadline = asyncio.get_running_loop().call_later(self._handshake_s, self._handshake_timeout)
        if self._on_made is not None:
            self._on_made(self)
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.get_buffer()

    def buffer_updated(self, count: int) -> None:
        try:
            self._read(count)
        except OSError as error:
            # Event loops treat an OSError as the connection's own error and do not report it.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _read(self, count: int) -> None:
        before = self.connection.payload_bytes
        try:
            events = self.connection.received(count)
        except P2PCastError as error:
            self.close(error)
            return
        if self.connection.fault is not None:
            # The rest of the input is processed, but nothing more is sent.
            self.writable = False
        self._flush()
        for event in events:
            if self._closed:
                return
            if type(event) is Established:
                self._established = True
                if self._deadline is not None:
                    self._deadline.cancel()
                self.writable = self.connection.fault is None
                self.owner.on_established(self, event)
            else:
                self.owner.on_event(self, event)
        if self.connection.fault is not None:
            self.close(self.connection.fault)
        if self._established and not self._closed:
            self.owner.on_read(self, self.connection.payload_bytes - before)
        if self._gathers:
            self._has_read = True
            self._wait_for(self.connection.missing_bytes - self._opaque)

    def eof_received(self) -> bool:
        set_close_timeout(self.socket)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if exc is not None and self._error is None:
            self._error = (
                explain(exc, self.remote_address[0])
                if isinstance(exc, ssl.SSLError)
                else RetryableError(f"connection to {self.remote_address[0]} lost: {exc}")
            )
        self._closed = True
        self.writable = False
        self._descriptor = -1
        self._transport = None
        for error in (self._error, self.connection.fault):
            if error is not None:
                # Break the reference cycle through the traceback's frames.
                error.__traceback__ = None
        self.connection.release()
        self.owner.on_closed(self, self._error)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        if not self.closed:
            self.writable = True
            self.owner.on_writable(self)

    # -- called by the owner

    @property
    def closed(self) -> bool:
        """Whether sending is no longer possible."""
        return self._closed or self.connection.fault is not None

    def write(self, *parts: bytes | memoryview) -> None:
        """Queue bytes. Above WRITE_HIGH_BYTES, ``writable`` is false until the queue has drained."""
        if self._transport is not None and not self._closed:
            self._transport.writelines(parts)

    def pace(self, bytes_s: int | None) -> None:
        """Limit the send rate in bytes per second, for queued bytes too; None means no limit."""
        if bytes_s != self._pace and self._transport is not None and not self._closed:
            self._pace = bytes_s
            pace(self._transport.get_extra_info("socket"), bytes_s)

    def gather(self, on: bool) -> None:
        """Wake up once for the rest of a piece (``on``), or for every packet. Call this at intervals: if nothing has
        been read since the last call, the bytes that have arrived are read.
        """
        self._gathers = on
        if not (on and self._has_read):
            self._wait_for(1)
        self._has_read = False

    def _wait_for(self, size: int) -> None:
        low = min(size, GATHER_MOST_BYTES) if size >= GATHER_LEAST_BYTES else 1
        if low != self._low and self._descriptor >= 0:
            self._low = low
            gather(self._descriptor, low)

    def pause_reading(self) -> None:
        if self._transport is not None and not self._closed:
            with contextlib.suppress(RuntimeError):
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._closed:
            with contextlib.suppress(RuntimeError):
                self._transport.resume_reading()

    def close(self, error: P2PCastError | None = None) -> None:
        """Send ``error``, if any, and close. ``on_closed`` follows."""
        if self._transport is None or self._closed:
            return
        self._end(error)
        if error is None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                # As below, but with more time for a slow reader.
                asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)
            return
        self.connection.fail(error)
        # uvloop may have closed the handle already, and reports that only afterwards.
        with contextlib.suppress(RuntimeError):
            self._flush()
        # Queued bytes for a peer that does not read must not keep the socket open.
        self._transport.close()
        asyncio.get_running_loop().call_later(1.0, self._transport.abort)

    def abort(self, error: P2PCastError | None = None) -> None:
        """Close at once, and drop queued bytes."""
        if self._transport is not None and not self._closed:
            self._end(error)
            self._transport.abort()

    def _end(self, error: P2PCastError | None) -> None:
        # The kernel may still hold bytes, perhaps for a host that has vanished.
        set_close_timeout(self.socket)
        self._closed = True
        self.writable = False
        self._descriptor = -1
        self._error = error

    def _flush(self) -> None:
        out = self.connection.take_output()
        if out and self._transport is not None:
            self._transport.write(out)

    def _handshake_timeout(self) -> None:
        self.close(RemoteError(f"no handshake within {self._handshake_s:g} s"))
