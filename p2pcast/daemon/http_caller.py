"""The certificate that the caller of an HTTPS request has shown."""

from __future__ import annotations

import time
from collections.abc import Container
from functools import lru_cache

from aiohttp import web

from p2pcast.ground.errors import RefusedError, RetryableError
from p2pcast.trust.certificates import certified, load
from p2pcast.trust.dial_permissions import Certified

KNOWN = 8192
"""Certificates whose contents are remembered: a request costs no parsing then."""


def certified_caller(request: web.Request, run: bytes, evicted: Container[bytes] = frozenset()) -> Certified | None:
    """Return the holder of the caller's certificate; None if the caller has none, as over plain HTTP.
    ``evicted``: node ids to refuse, also on connections from before the eviction.

    Raises RefusedError: evicted, or of another run. Raises RetryableError: the certificate has expired since the
    connection began. The connection then ends after the answer, and the caller's next one shows its next certificate.
    """
    tls = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    # TLS gives a certificate only after it has verified the certificate by the run's authority.
    certificate = None if tls is None else tls.getpeercert(binary_form=True)
    if certificate is None:
        return None
    holder, until = _contents(certificate)
    if holder.run != run:
        raise RefusedError("the caller's certificate is of another run")
    if holder.node in evicted:
        raise RefusedError("this node was evicted from the run")
    if time.time() >= until:
        request.protocol.close()
        raise RetryableError("the caller's certificate has expired on this connection: connect again")
    return holder


@lru_cache(maxsize=KNOWN)
def _contents(certificate: bytes) -> tuple[Certified, float]:
    """Return the holder of a certificate (DER), and when it expires in Unix seconds. Raises RefusedError."""
    return certified(certificate), load(certificate).not_valid_after_utc.timestamp()
