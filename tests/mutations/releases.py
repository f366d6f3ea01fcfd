"""Defences against nodes and state folders of other releases."""

from __future__ import annotations

from mutation import HANDSHAKE, Mutation

VERSIONS = "p2pcast/wire/protocol_versions.py"
FORMAT = "p2pcast/store/state_format.py"
NEGOTIATION = "tests/p2pcast/wire/test_protocol_versions.py::"
FOLDER = "tests/p2pcast/store/test_state_format.py::"

RELEASES = [
    Mutation(
        "downgrades two nodes to an older protocol than both know",
        HANDSHAKE,
        "label %= self.protocol",
        "label %= 2",
        NEGOTIATION + "test_a_node_on_the_path_cannot_force_an_older_protocol",
    ),
    Mutation(
        "settles on a protocol that was not offered",
        VERSIONS,
        "if protocol not in own or before not in (None, protocol):",
        "if False:",
        NEGOTIATION + "test_a_listener_keeps_to_one_offered_version",
    ),
    Mutation(
        "a node of another release connects",
        VERSIONS,
        "if max(dialer.least, listener.least) <= (greatest := min(dialer.greatest, listener.greatest)):",
        "if (greatest := min(dialer.greatest, listener.greatest)):",
        NEGOTIATION + "test_without_a_protocol_in_common_both_sides_hear_which_to_update",
    ),
    Mutation(
        "a node of another release connects",
        "p2pcast/wire/connection.py",
        "            self._handshake.greeted(content)\n        record, invalid_keys = records.read(kind, content)",
        "            records.read(kind, content)\n"
        "            self._handshake.greeted(content)\n        record, invalid_keys = records.read(kind, content)",
        NEGOTIATION + "test_a_later_protocols_hello_may_have_any_form",
    ),
    Mutation(
        "a state folder of a later release",
        FORMAT,
        "if found.format > FORMAT:",
        "if False:",
        FOLDER + "test_folder_of_a_later_release_is_refused_unchanged",
    ),
    Mutation(
        "p2pcast 0.1 is started on a state folder",
        FORMAT,
        "        if not upgrade:\n            return _held",
        "        if True:\n            return _held",
        FOLDER + "test_folder_of_the_first_release_is_upgraded_in_place",
    ),
    Mutation(
        "a crash in the middle of an upgrade",
        FORMAT,
        "        for number in range(found.format, FORMAT):",
        "        atomic_write(state / FILE, json.dumps({'format': FORMAT, 'release': RELEASE}).encode(), 0o600)\n"
        "        for number in range(found.format, FORMAT):",
        FOLDER + "test_upgrade_step_is_repeated_until_the_format_is_stated",
    ),
    Mutation(
        "two processes open a state folder while it is upgraded",
        FORMAT,
        "if old is None or _is_at(old, lock):",
        "if True:",
        FOLDER + "test_lock_replaced_before_locking_is_not_used",
    ),
]
