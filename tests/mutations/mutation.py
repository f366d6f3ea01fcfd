"""A defence as a text that can be taken out, and the test that notices.

``attack`` is a part of the attack's line in docs/design/security.md. ``old`` occurs exactly once in ``file``; ``new``
replaces it and removes the defence.
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
        """Raises ValueError unless the defence occurs exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} contains {self.old!r} {text.count(self.old)} times")
        return text.replace(self.old, self.new)


TLS = "tests/p2pcast/transport/test_tls.py::"
TLS_STRANGERS = "tests/p2pcast/transport/test_tls_strangers.py::"
LISTENER = "tests/p2pcast/transport/test_listener.py::"
CERTIFIED = "tests/p2pcast/wire/test_certified.py::"
LEDGER = "tests/p2pcast/trust/test_token_register.py::"
CERTIFICATES = "tests/p2pcast/trust/test_certificates.py::"
TRUST = "tests/daemons/trust/test_trust.py::"
STOLEN_CERTIFICATES = "tests/daemons/trust/test_stolen_certificates.py::"
MIRROR = "tests/daemons/mirror/test_mirror.py::"
NAMES = "tests/p2pcast/mirror/test_object_names.py::"
HTTP = "tests/p2pcast/daemon/test_http_server.py::"
HANDSHAKE = "p2pcast/wire/handshake.py"
CONTEXTS = "p2pcast/trust/tls_contexts.py"
TOKEN_LEDGER = "p2pcast/trust/token_register.py"
SERVER = "p2pcast/daemon/http_server.py"
ACCESS = "p2pcast/daemon/http_access.py"
TLS_ACCEPTOR = "p2pcast/sockets/tls_acceptor.py"
HANDSHAKE_ADMISSION = "p2pcast/sockets/handshake_admission.py"
ADMISSION_TESTS = "tests/p2pcast/sockets/test_handshake_admission.py::"
EVICTIONS = "tests/p2pcast/trust/test_evictions.py::"
EVICTED = "tests/daemons/trust/test_evictions.py::"
CALLED = "tests/daemons/trust/test_names.py::"
TOKENS = "tests/daemons/trust/test_tokens.py::"
STATEMENTS = "p2pcast/trust/evictions.py"
ADMISSION = "trainer_node/admission/admission.py"
TRUST_STATE = "trainer_node/admission/trust_state.py"
TRUST_COMMANDS = "trainer_node/admission/trust_commands.py"
OWN_TOKEN = "trainer_node/admission/own_token.py"
