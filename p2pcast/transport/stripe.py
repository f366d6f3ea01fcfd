"""One connection on the event loop: the thin shell around ``wire.Connection``.

Promises: payload is read into the buffer that carries it on; a write never queues more than WRITE_HIGH_BYTES here, so that whichever stripe can send takes
the next piece; every error ends in exactly one ``on_closed``; what it held is free as soon as it has ended, without waiting for Python's search for cycles, which is rare
where there are many objects: somebody who connects for nothing would fill the memory until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

from p2pcast.addresses import plain_host
from p2pcast.errors import P2PCastError, RemoteError, RetryableError
from p2pcast.limits import KIB
from p2pcast.transport.security import explain, secure
from p2pcast.transport.sockets import Sockets, gather, hasten, pace, unsent_bytes
from p2pcast.transport.tcp_info import TcpInfo, read
from p2pcast.wire.connection import Connection, Established, Event

HANDSHAKE_S = 10.0
"""A connection that has not shown a token by then is closed."""
WRITE_HIGH_BYTES = 128 * KIB
"""Queued in user space for one stripe: two of the largest pieces of a delta."""
WRITE_LOW_BYTES = 64 * KIB
CLOSE_S = 10.0
"""A connection that was closed in peace has so long to take what is queued for it."""

GATHER_LEAST_BYTES, GATHER_MOST_BYTES = 4 * KIB, 64 * KIB
"""Waited for at once: fewer are not worth telling the kernel, more would lie there with no room behind them."""
RECORD_BYTES = 16 * KIB
"""Behind TLS so much of what is missing may have been read already: the part of a record that cannot be opened yet."""

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
        """``on_made``: called once there is a transport (behind TLS: once TLS is up)."""
        self.connection = connection
        self.owner = owner
        self._sockets = sockets
        self._handshake_s = handshake_s
        self._on_made = on_made
        self.number = 0
        self.writable = False
        self.remote_address: tuple[str, int] = ("", 0)
        self.own_host = ""
        """The address of this machine on the connection."""
        self._transport: asyncio.Transport | None = None
        """None again once it is lost: behind TLS it holds us."""
        self.made = False
        """Whether there has been a transport."""
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
        """What the other side's kernel has acknowledged of all that was sent here; 0 where this kernel does not say."""
        info = self.info()
        return 0 if info is None else info.acked_bytes

    @property
    def socket(self) -> Any:
        """None when there is none, or none any more."""
        return None if self._closed or self._transport is None else self._transport.get_extra_info("socket")

    @property
    def unsent_bytes(self) -> int:
        """What was written here and has not been sent."""
        if self._transport is None or self._descriptor < 0:
            return 0
        return self._transport.get_write_buffer_size() + unsent_bytes(self._descriptor)

    @property
    def certificate(self) -> bytes | None:
        """The other side's, DER; None without TLS, or once this is closed."""
        tls = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        return None if tls is None else tls.getpeercert(binary_form=True)

    def info(self) -> TcpInfo | None:
        """What the kernel says of this connection; None where it says nothing."""
        return read(self.socket)

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.made = True
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
                secure(self.connection, tls)
            except P2PCastError as error:
                self.abort(error)
                return
        self._deadline = asyncio.get_running_loop().call_later(self._handshake_s, self._too_slow)
        if self._on_made is not None:
            self._on_made(self)
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.get_buffer()

    def buffer_updated(self, count: int) -> None:
        try:
            self._read(count)
        except OSError as error:
            # Event loops take an OSError for the connection's own, and tell nobody.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _read(self, count: int) -> None:
        before = self.connection.payload_bytes
        try:
            events = self.connection.received(count)
        except P2PCastError as error:
            self.close(error)
            return
        if self.connection.fault is not None:
            # It is heard to the end, but not answered any more.
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
        hasten(self.socket)
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
                # Its frames hold us, and we hold it.
                error.__traceback__ = None
        self.connection.release()
        self.owner.on_closed(self, self._error)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        if not self.closed:
            self.writable = True
            self.owner.on_writable(self)

    # -- our side

    @property
    def closed(self) -> bool:
        """Nothing can be sent any more."""
        return self._closed or self.connection.fault is not None

    def write(self, *parts: bytes | memoryview) -> None:
        """Queue bytes. More than WRITE_HIGH_BYTES turn ``writable`` off until they have gone."""
        if self._transport is not None and not self._closed:
            self._transport.writelines(parts)

    def pace(self, bytes_s: int | None) -> None:
        """From now on nothing is sent faster than this, also what is queued already; None: as fast as it goes."""
        if bytes_s != self._pace and self._transport is not None and not self._closed:
            self._pace = bytes_s
            pace(self._transport.get_extra_info("socket"), bytes_s)

    def gather(self, on: bool) -> None:
        """Whether to be woken for the rest of a piece at once. To be said again and again: where nothing has come since the last time, what is there of it is taken."""
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
        """Say why, if there is a why, and close. ``on_closed`` follows."""
        if self._transport is None or self._closed:
            return
        hasten(self.socket)
        self._closed = True
        self.writable = False
        self._descriptor = -1
        self._error = error
        if error is None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                # The same, for one that may be reading slowly.
                asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)
            return
        self.connection.fail(error)
        self._flush()
        # Bytes of a peer that doesn't read must not keep the socket alive.
        self._transport.close()
        asyncio.get_running_loop().call_later(1.0, self._transport.abort)

    def abort(self, error: P2PCastError | None = None) -> None:
        """Close at once; what is queued is lost."""
        if self._transport is not None and not self._closed:
            # The kernel still has what it was given, for somebody who may have vanished.
            hasten(self.socket)
            self._closed = True
            self.writable = False
            self._descriptor = -1
            self._error = error
            self._transport.abort()

    def _flush(self) -> None:
        out = self.connection.take_output()
        if out and self._transport is not None:
            self._transport.write(out)

    def _too_slow(self) -> None:
        self.close(RemoteError(f"no handshake within {self._handshake_s:g} s"))
