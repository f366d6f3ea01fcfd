"""Bearer tokens of the HTTP sides: one a daemon, all made of the hub's, so that whoever runs the hub may ask every peer, and no peer the hub. Pure.

The hub's own lies in its state folder. They open HTTP and nothing else: no join token travels over HTTP.
"""

from __future__ import annotations

import base64
import hmac

VARIABLE = "P2PCAST_HTTP_TOKEN"
FILE = "http.token"
SECRET_BYTES = 20
_LABEL = b"p2pcast http 1\0"


def text(secret: bytes) -> str:
    """As it is written down."""
    return base64.b32encode(secret).decode().rstrip("=").lower()


def of_run(secret: bytes) -> str:
    """The hub's where links are plain text, and the token's secret is everybody's."""
    return text(hmac.digest(secret, _LABEL, "sha256")[:SECRET_BYTES])


def of_node(hubs: str, node: bytes) -> str:
    """A peer's."""
    return text(hmac.digest(hubs.encode(), _LABEL + node, "sha256")[:SECRET_BYTES])
