"""A defence as a text that can be taken out, and the test that notices.

``attack`` is a part of the line that the mutation belongs to. ``old`` stands exactly once in ``file``; ``new`` is what stands there without the defence.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    attack: str
    file: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        return f"{self.file}: {self.test.rpartition('::')[2]}"

    def applied(self, text: str) -> str:
        """Raises ValueError where the defence is not to be found."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


TLS = "tests/p2pcast/transport/test_tls.py::"
LISTENER = "tests/p2pcast/transport/test_listener.py::"
CERTIFIED = "tests/p2pcast/wire/test_certified.py::"
LEDGER = "tests/p2pcast/trust/test_ledger.py::"
CERTIFICATES = "tests/p2pcast/trust/test_certificates.py::"
TRUST = "tests/daemons/test_trust.py::"
THIEVES = "tests/daemons/test_thieves.py::"
MIRROR = "tests/daemons/mirror/test_mirror.py::"
NAMES = "tests/p2pcast/mirror/test_names.py::"
HTTP = "tests/p2pcast/test_http.py::"
HANDSHAKE = "p2pcast/wire/handshake.py"
CONTEXTS = "p2pcast/trust/contexts.py"
GRANTS = "p2pcast/trust/ledger.py"
SERVER = "p2pcast/http.py"
DOOR = "p2pcast/transport/door.py"
TURNSTILE = "p2pcast/transport/turnstile.py"
CROWD = "tests/p2pcast/transport/test_turnstile.py::"
EVICTIONS = "tests/p2pcast/trust/test_evictions.py::"
EVICTED = "tests/daemons/test_evictions.py::"
CALLED = "tests/daemons/test_names.py::"
TOKENS = "tests/daemons/test_tokens.py::"
STATEMENTS = "p2pcast/trust/evictions.py"
ADMISSION = "trainer_node/admission.py"
