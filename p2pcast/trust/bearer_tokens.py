"""Bearer tokens of the HTTP servers, one per daemon. Pure.

Each peer's token is derived from the hub's. So the hub's operator can send requests to every peer, and a peer cannot
send requests to the hub. The hub's token is in its state folder. Bearer tokens give access to HTTP only; no join token
travels over HTTP.
"""

from __future__ import annotations

import base64
import hmac

VARIABLE = "P2PCAST_HTTP_TOKEN"
FILE = "http.token"
SECRET_BYTES = 20
_LABEL = b"p2pcast http 1\0"


def text(secret: bytes) -> str:
    """A token's text form: base32 in lower case."""
    return base64.b32encode(secret).decode().rstrip("=").lower()


def of_run(secret: bytes) -> str:
    """The hub's bearer token on plaintext links, derived from the join token's secret, which all nodes share."""
    return text(hmac.digest(secret, _LABEL, "sha256")[:SECRET_BYTES])


def of_node(hub_token: str, node: bytes) -> str:
    """A peer's bearer token, derived from the hub's bearer token and the peer's node id."""
    return text(hmac.digest(hub_token.encode(), _LABEL + node, "sha256")[:SECRET_BYTES])
