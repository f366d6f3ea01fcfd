"""Measurements of a hub without joining: connections, the certificate shown, the clock.

Guarantees: no function raises, whatever program answers at the address. No secret is sent: the token is compared only
on this machine. Every wait has a time limit.
"""

from __future__ import annotations

import email.utils
import http.client
import socket
import time
import urllib.error
import urllib.request
from dataclasses import replace

from p2pcast.doctor.machine_facts import HubFacts
from p2pcast.ground.addresses import Address, show_address
from p2pcast.ground.errors import RefusedError
from p2pcast.trust.certificates import certified, valid_at
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import first_contact

CONNECTS = 8
"""Connections one after the other: enough for a median, and few for the hub's admission of handshakes."""
WAIT_S = 5.0
"""Time limit in seconds of each connection, handshake and request."""


def measure_hub(hub: Address, token: JoinToken | None, http_url: str | None, *, plaintext: bool) -> HubFacts:
    """Collect all facts about the hub. ``http_url``: the address of its HTTP server."""
    facts = _connect(HubFacts(address=show_address(*hub), plaintext=plaintext), hub)
    if token is not None:
        facts = replace(facts, token_run=token.run.hex(), token_encrypts=bool(token.authority))
    if facts.connects_s and not plaintext:
        facts = _shake_hands(facts, hub)
    return facts if http_url is None else _compare_clocks(facts, http_url)


def _connect(facts: HubFacts, hub: Address) -> HubFacts:
    try:
        where = _answering(hub)
    except (OSError, ValueError) as error:
        return replace(facts, attempts=1, fault=_words(error))
    took: list[float] = []
    fault = ""
    for _ in range(CONNECTS):
        began = time.monotonic()
        try:
            with socket.create_connection(where, timeout=WAIT_S):
                took.append(time.monotonic() - began)
        except OSError as error:
            fault = _words(error)
    return replace(facts, attempts=CONNECTS, connects_s=tuple(took), fault=fault)


def _answering(hub: Address) -> Address:
    """Return a resolved address of the hub that accepts connections, so that later timings exclude name resolution.
    Raises OSError, ValueError.
    """
    with socket.create_connection(hub, timeout=WAIT_S) as sock:
        where = sock.getpeername()
        return str(where[0]), int(where[1])


def _shake_hands(facts: HubFacts, hub: Address) -> HubFacts:
    try:
        with (
            socket.create_connection(hub, timeout=WAIT_S) as sock,
            first_contact().wrap_socket(sock, server_hostname=hub[0]) as tls,
        ):
            shown = tls.getpeercert(binary_form=True) or b""
    except (OSError, ValueError) as error:
        return replace(facts, tls=False, tls_fault=_words(error))
    try:
        holder, in_force = certified(shown), valid_at(shown, time.time())
    except RefusedError:
        return replace(facts, tls=True)
    return replace(facts, tls=True, role=holder.role, run=holder.run.hex(), in_force=in_force)


def _compare_clocks(facts: HubFacts, url: str) -> HubFacts:
    facts = replace(facts, http=url)
    try:
        began, at = time.monotonic(), time.time()
        date = _date(url.rstrip("/") + "/healthz")
        took_s = time.monotonic() - began
    except (OSError, ValueError, http.client.HTTPException) as error:
        return replace(facts, http_fault=_words(error))
    if date is None:
        return replace(facts, http_fault="the answer has no Date")
    # A Date has no fractions of a second: the clock showed it for one second.
    offset_s = date + 0.5 - (at + took_s / 2)
    return replace(facts, clock_offset_s=offset_s, clock_error_s=0.5 + took_s / 2)


def _date(url: str) -> float | None:
    """Unix time in an answer's Date. Raises OSError, ValueError, HTTPException."""
    try:
        # Without a proxy, whose answer would have the proxy's Date.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=WAIT_S) as answer:
            text = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        text = error.headers.get("Date")
        error.close()
    return None if text is None else email.utils.parsedate_to_datetime(text).timestamp()


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(getattr(error, "strerror", None) or reason or error or type(error).__name__)
