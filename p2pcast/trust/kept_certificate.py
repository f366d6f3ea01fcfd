"""A node's credentials in a file of its state folder, and the TLS contexts that show them.

Promises: credentials of another node, role, run or authority in the file are not used. A node keeps its key when the
run's authority is replaced, because the hub knows the node by that key.
"""

from __future__ import annotations

import time
from pathlib import Path

from p2pcast.trust.certificates import Key, fingerprint
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.tls_contexts import Tls


class KeptCertificate:
    """``tls`` allows no connection before there are credentials, and stays the same object. ``authority``: fingerprint
    of the run's authority.
    """

    def __init__(self, path: Path, who: Certified, authority: bytes) -> None:
        self.path = path
        self.who = who
        self.tls = Tls()
        self.held: Credentials | None = None
        self.key: Key | None = None
        """The node's key, also if its certificate in the file is of an earlier authority of the run."""
        self.was_in_force = False
        """A certificate was in force while this process ran."""
        self._authority = authority

    @property
    def until(self) -> float | None:
        """When the certificate ends, in Unix seconds."""
        return None if self.held is None else self.held.until

    def read(self) -> Credentials | None:
        """The credentials in the file, if they are this node's and this run's. Blocks. Raises LocalError."""
        if not self.path.exists():
            return None
        found = Credentials.load(self.path)
        if found.who == self.who:
            self.key = found.key
        return found if found.who == self.who and fingerprint(found.authority) == self._authority else None

    def use(self, credentials: Credentials) -> None:
        """Show these credentials from the next connection on."""
        self.tls.use(credentials)
        self.held, self.key = credentials, credentials.key
        self.was_in_force |= credentials.in_force(time.time())
