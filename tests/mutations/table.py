"""Every defence of docs/threats.md as a text that can be taken out, and the test that notices.

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

GETTING_IN = [
    Mutation(
        "links without a certificate",
        HANDSHAKE,
        'if stranger and content["purpose"] != ENROL:',
        "if False:",
        TLS + "test_strangers_get_no_further_than_enrolment",
    ),
    Mutation(
        "links without a certificate",
        HANDSHAKE,
        'if stranger and content["purpose"] != ENROL:',
        "if False:",
        CERTIFIED + "test_without_a_certificate_there_is_nothing_but_enrolment",
    ),
    Mutation(
        "links without a certificate",
        CONTEXTS,
        "ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED",
        "ssl.CERT_OPTIONAL",
        TLS + "test_a_peers_listener_takes_no_strangers_at_all",
    ),
    Mutation(
        "certificates of another authority, run, or time",
        CONTEXTS,
        "context.verify_mode = verify",
        "context.verify_mode = ssl.CERT_NONE",
        TLS + "test_another_authoritys_certificates_do_not_count",
    ),
    Mutation(
        "certificates of another authority, run, or time",
        CONTEXTS,
        "context.verify_mode = verify",
        "context.verify_mode = verify\n    context.verify_flags |= 0x200000  # X509_V_FLAG_NO_CHECK_TIME",
        TLS + "test_an_expired_certificate_opens_nothing",
    ),
    Mutation(
        "certificates of another authority, run, or time",
        HANDSHAKE,
        "if self._certified.run != self._identity.token.run:",
        "if False:",
        CERTIFIED + "test_certificates_of_other_runs_do_not_count",
    ),
    Mutation(
        "answers in the hub's place to learn a token",
        HANDSHAKE,
        'if self._identity.vouch(self._leaf, content.get("authority", b"")).node != node:',
        "if False:",
        CERTIFIED + "test_nothing_is_proved_to_somebody_on_the_way",
    ),
    Mutation(
        "answers in the hub's place to learn a token",
        HANDSHAKE,
        'channel = b"" if self._leaf is None else fingerprint(self._leaf)',
        'channel = b""',
        CERTIFIED + "test_a_proof_is_bound_to_its_channel",
    ),
    Mutation(
        "answers in the hub's place to learn a token",
        HANDSHAKE,
        "return self._token.proof(label, self._raw, nonce, node, channel)",
        "return self._token.secret.ljust(32)",
        CERTIFIED + "test_the_secret_does_not_travel",
    ),
    Mutation(
        "reads or changes what passes",
        CONTEXTS,
        "context.minimum_version = ssl.TLSVersion.TLSv1_3",
        "context.maximum_version = ssl.TLSVersion.TLSv1_2",
        TLS + "test_links_are_mutual_tls_1_3",
    ),
    Mutation(
        "reads or changes what passes",
        CONTEXTS,
        "context.minimum_version = ssl.TLSVersion.TLSv1_3",
        "context.maximum_version = ssl.TLSVersion.TLSv1_2",
        TRUST + "test_a_run_behind_tls",
    ),
    Mutation(
        "makes a peer give up by answering for the hub",
        "rollout_node/control.py",
        '                except UntrustedError as error:\n                    logger.warning("hub: %s", error)\n',
        "",
        TRUST + "test_an_impostor_at_the_hubs_address_ends_nobody",
    ),
    Mutation(
        "joins with it",
        GRANTS,
        "if self.expires is not None and now >= self.expires:",
        "if False:",
        LEDGER + "test_a_token_expires",
    ),
    Mutation(
        "joins with it",
        GRANTS,
        "if self.uses is not None and self.used >= self.uses:",
        "if False:",
        LEDGER + "test_a_token_is_used_up",
    ),
    Mutation(
        "joins with it",
        GRANTS,
        "        if self.revoked:",
        "        if False:",
        LEDGER + "test_a_token_is_revoked_by_enough_of_its_id",
    ),
    Mutation(
        "joins with it",
        GRANTS,
        "if self.uses is not None and self.used >= self.uses:",
        "if False:",
        TRUST + "test_tokens_expire_are_used_up_and_revoked",
    ),
    Mutation(
        "joins with it",
        GRANTS,
        "if role != found.role and not (found.own and local):",
        "if role != found.role and not local:",
        TRUST + "test_a_made_token_is_for_its_role_alone",
    ),
    Mutation(
        "publishes with it",
        GRANTS,
        "if role != found.role and not (found.own and local):",
        "if False:",
        LEDGER + "test_a_peers_token_buys_no_trainers_certificate",
    ),
    Mutation(
        "takes another node's name",
        GRANTS,
        "if known is not None and (known.key, known.role) != (key, role):",
        "if False:",
        TRUST + "test_a_stolen_name_is_not_given_twice",
    ),
    Mutation(
        "takes another node's name",
        GRANTS,
        "if known is not None and (known.key, known.role) != (key, role):",
        "if False:",
        TRUST + "test_renewal_is_for_the_same_key",
    ),
]

FROM_INSIDE = [
    Mutation(
        "to act as hub, to publish",
        HANDSHAKE,
        "if who.role not in DIALERS[purpose]:",
        "if False:",
        CERTIFIED + "test_roles_by_certificate",
    ),
    Mutation(
        "to act as hub, to publish",
        HANDSHAKE,
        "if found is None or found.role not in LISTENERS[purpose]:",
        "if found is None:",
        CERTIFIED + "test_roles_by_certificate",
    ),
    Mutation(
        "to act as hub, to publish",
        HANDSHAKE,
        "if who.role not in DIALERS[purpose]:",
        "if False:",
        TRUST + "test_a_peer_publishes_nothing_and_is_no_hub",
    ),
    Mutation(
        "to act as hub, to publish",
        HANDSHAKE,
        "if who.node != self._remote:",
        "if False:",
        CERTIFIED + "test_nobody_speaks_for_another_node",
    ),
    Mutation(
        "to act as hub, to publish",
        HANDSHAKE,
        "if found is None or found.role not in LISTENERS[purpose]:",
        "if found is None:",
        TLS + "test_a_peer_does_not_pass_for_the_hub",
    ),
    Mutation(
        "to act as hub, to publish",
        "p2pcast/trust/roles.py",
        '    "data": frozenset({"hub", "peer"}),\n    "publish": frozenset({"trainer"}),',
        '    "data": frozenset({"hub", "peer", "trainer"}),\n    "publish": frozenset({"trainer"}),',
        TRUST + "test_a_trainer_publishes_and_does_nothing_else",
    ),
    Mutation(
        "to issue certificates",
        "p2pcast/trust/certificates.py",
        "        load(certificate).verify_directly_issued_by(load(authority))",
        "        load(authority)",
        CERTIFICATES + "test_a_peer_can_not_issue",
    ),
    Mutation(
        "to issue certificates",
        "p2pcast/trust/authority.py",
        "x509.BasicConstraints(ca=False, path_length=None)",
        "x509.BasicConstraints(ca=True, path_length=None)",
        CERTIFICATES + "test_it_names_the_holder_and_nothing_more",
    ),
    Mutation(
        "to pass on other weights, or versions of its own",
        "p2pcast/artifact/records.py",
        "        _public_key(public).verify(signed[sig_start:sig_end], domain + body)",
        "        _public_key(public)",
        THIEVES + "test_a_parent_that_makes_versions_of_its_own_is_left",
    ),
    Mutation(
        "to pass on other weights, or versions of its own",
        "p2pcast/artifact/records.py",
        "        _public_key(public).verify(signed[sig_start:sig_end], domain + body)",
        "        _public_key(public)",
        "tests/p2pcast/relay/test_upstream.py::test_forgeries_end_the_link",
    ),
    Mutation(
        "to pass on other weights, or versions of its own",
        "p2pcast/relay/artifact.py",
        "            return Offer.CORRUPT",
        "            pass",
        "tests/p2pcast/relay/test_chain.py::test_a_corrupt_piece_is_dropped_blamed_and_fetched_elsewhere",
    ),
    Mutation(
        "to lead the swarm back to an old version",
        "p2pcast/relay/catchup.py",
        "    end = max((v for v in best if v is not None), default=None) if target is None else target",
        "    end = min((v for v in best if v is not None), default=None) if target is None else target",
        THIEVES + "test_a_parent_that_brings_old_versions_again_moves_nobody",
    ),
    Mutation(
        "to have a peer whose cells have rotted put others in their place",
        "p2pcast/relay/artifact.py",
        "            return Offer.CORRUPT",
        "            pass",
        "tests/daemons/test_healing.py::test_a_source_that_sends_other_cells_is_refused",
    ),
    Mutation(
        "to keep a hub busy with its mirror",
        "p2pcast/mirror/doubts.py",
        "            self._answered.add(doubt.name)",
        "            pass",
        "tests/p2pcast/mirror/test_doubts.py::test_a_complaint_is_looked_into_first_and_whatever_the_tag",
    ),
    Mutation(
        "to keep a hub busy with its mirror",
        "p2pcast/mirror/doubts.py",
        "            if known and len(self._complaints) < MAX_COMPLAINTS:",
        "            if known:",
        "tests/p2pcast/mirror/test_doubts.py::test_complaints_are_bounded",
    ),
    Mutation(
        "to keep a hub busy with its mirror",
        "trainer_node/mirroring.py",
        "        if right:\n            self._doubts.right(doubt)",
        "        if False:\n            self._doubts.right(doubt)",
        "tests/daemons/mirror/test_mirror_mending.py::test_a_complaint_makes_a_hub_read_and_write_nothing_that_is_right",
    ),
    Mutation(
        "to stay after it was found out",
        HANDSHAKE,
        "if self._remote in self._identity.evicted:",
        "if False:",
        TRUST + "test_who_is_evicted_is_cut_off_at_once_and_stays_out",
    ),
    Mutation(
        "to stay after it was found out",
        "rollout_node/peer.py",
        'self.evicted = {bytes.fromhex(node) for node in self.memory["evicted"]}',
        "self.evicted: set[bytes] = set()",
        TRUST + "test_peers_refuse_the_evicted_while_the_hub_is_away",
    ),
    Mutation(
        "to stay after it was found out",
        "rollout_node/peer.py",
        '        self.listener.drop(self.evicted, error)\n        if hasattr(self, "downstream"):',
        "        if False:",
        TRUST + "test_peers_refuse_the_evicted_while_the_hub_is_away",
    ),
    Mutation(
        "to stay after it was found out",
        GRANTS,
        "        self.check_not_evicted(node)\n",
        "",
        LEDGER + "test_the_evicted_get_nothing_by_whichever_token",
    ),
    Mutation(
        "to command others over HTTP",
        "p2pcast/trust/bearer.py",
        '    return text(hmac.digest(hubs.encode(), _LABEL + node, "sha256")[:SECRET_BYTES])',
        "    return hubs",
        TRUST + "test_what_opens_a_peer_does_not_open_the_hub",
    ),
    Mutation(
        "to feed a peer that did not ask for it",
        "rollout_node/dialling.py",
        '        raise RefusedError("nobody here has asked this node to dial")',
        "        return",
        "tests/rollout_node/test_dialling.py::test_a_parent_that_was_not_called_is_shown_out",
    ),
    Mutation(
        "to say that others cannot be reached",
        "topology/reach.py",
        "if known.answers_nowhere and not known.reached and",
        "if not known.reached and",
        "tests/topology/test_reach.py::test_one_failed_try_is_remembered_for_a_while_and_the_next_for_longer",
    ),
    Mutation(
        "to have the hub and peers dial where it likes",
        "p2pcast/transport/dial.py",
        "(await _dial_stripe(*where, identity, hello, expect, tls, stands=",
        "(await _dial_stripe(*where, identity, hello, None, tls, stands=",
        "tests/p2pcast/transport/test_dial_any.py::test_whether_a_node_answers",
    ),
    Mutation(
        "to break a decoder or a daemon",
        "p2pcast/wire/connection.py",
        '        if size > MAX_BODY[kind]:\n            raise RemoteError(f"{kind.name} of {size} bytes is over the limit of {MAX_BODY[kind]}")\n        if (self.state',
        "        if (self.state",
        "tests/p2pcast/wire/test_fuzz.py",
    ),
    Mutation(
        "to break a decoder or a daemon",
        "p2pcast/wire/messages.py",
        "        dry.skip()\n",
        "",
        "tests/p2pcast/wire/test_fuzz.py",
    ),
]

MIRRORS = [
    Mutation(
        "to keep it from leading anywhere, by altering objects",
        "p2pcast/mirror/doubts.py",
        "if artifact is not None and self._right.get(name) != _tag(found):",
        "if False:",
        "tests/daemons/mirror/test_mirror_mending.py::test_a_hub_that_starts_puts_right_whatever_became_wrong",
    ),
    Mutation(
        "to keep it from leading anywhere, by altering objects",
        "p2pcast/mirror/doubts.py",
        "if artifact is not None and self._right.get(name) != _tag(found):",
        "if artifact is not None and name not in self._right:",
        "tests/daemons/mirror/test_mirror_mending.py::test_what_is_changed_under_a_hub_is_put_right_when_it_looks",
    ),
    Mutation(
        "to have other weights installed",
        "p2pcast/relay/artifact.py",
        "            return Offer.CORRUPT",
        "            pass",
        MIRROR + "test_what_the_store_has_spoilt_is_found_and_another_way_taken",
    ),
    Mutation(
        "to have other weights installed",
        "rollout_node/mirrored.py",
        "if len(key) != KEY_BYTES or run_id(key) != self._run:",
        "if len(key) != KEY_BYTES:",
        MIRROR + "test_another_runs_key_is_refused",
    ),
    Mutation(
        "to lead a follower back",
        "rollout_node/following.py",
        "        return [] if self._leads_back(way) else way",
        "        return way",
        MIRROR + "test_a_mirror_that_shows_less_than_it_did_takes_nobody_back",
    ),
    Mutation(
        "to fill a follower's memory or disk",
        "p2pcast/mirror/names.py",
        "    if most > limits.MAX_TAIL_BYTES:",
        "    if False:",
        NAMES + "test_no_tail_is_asked_for_that_could_not_be_read",
    ),
    Mutation(
        "to fill a follower's memory or disk",
        "p2pcast/mirror/objects.py",
        "            if size > most_bytes:",
        "            if False:",
        MIRROR + "test_more_than_may_be_there_is_not_read",
    ),
    Mutation(
        "to fill a follower's memory or disk",
        "p2pcast/mirror/objects.py",
        "                if len(out) > most:",
        "                if False:",
        MIRROR + "test_more_than_may_be_there_is_not_read",
    ),
    Mutation(
        "to have a hub remove, or read, what is not the run's",
        "p2pcast/mirror/names.py",
        "    found = _MARKER.fullmatch(name)",
        "    found = _MARKER.match(name)",
        NAMES + "test_nothing_else_is_a_marker",
    ),
    Mutation(
        "to have a hub remove, or read, what is not the run's",
        "p2pcast/mirror/names.py",
        "    found = _TAIL.fullmatch(name)",
        "    found = _TAIL.match(name)",
        "tests/p2pcast/mirror/test_plan.py::test_what_is_not_ours_is_left_alone",
    ),
]

WEARING_OUT = [
    Mutation(
        "many silent connections",
        TURNSTILE,
        "        if len(self._of) >= self.most:",
        "        if False:",
        TLS + "test_silent_connections_push_themselves_out",
    ),
    Mutation(
        "many silent connections",
        DOOR,
        "self._loop.call_at(self._until, self.end)",
        "self._loop.call_at(self._until + 1e6, self.end)",
        TLS + "test_a_slow_tls_handshake_is_ended",
    ),
    Mutation(
        "many silent connections",
        DOOR,
        "ssl=tls, ssl_handshake_timeout=left_s",
        "ssl=tls",
        TLS + "test_a_handshake_that_is_not_gone_on_with_is_ended",
    ),
    Mutation(
        "many silent connections",
        TURNSTILE,
        "fullest = max(self._inside.values(), key=len)",
        "fullest = next(iter(self._inside.values()))",
        CROWD + "test_the_oldest_of_the_fullest_address_gives_way",
    ),
    Mutation(
        "handshakes that are begun and not gone on with",
        DOOR,
        "elif len(said) > RECORD_BYTES and len(said) >= RECORD_BYTES + size:",
        "elif True:",
        TLS + "test_nothing_is_done_for_a_part_of_a_client_hello",
    ),
    Mutation(
        "handshakes that are begun and not gone on with",
        TURNSTILE,
        "            wait_s = known.allowance.wait_s(now)",
        "            wait_s = 0.0",
        TLS + "test_handshakes_for_nothing_are_rationed_and_links_are_not",
    ),
    Mutation(
        "handshakes that are begun and not gone on with",
        TURNSTILE,
        "        known.allowance.give_back(now)",
        "        pass",
        CROWD + "test_whoever_shows_who_it_is_has_cost_nothing",
    ),
    Mutation(
        "handshakes that are begun and not gone on with",
        TURNSTILE,
        "                wait_s = max(wait_s, self._strangers.wait_s(now))",
        "                pass",
        CROWD + "test_many_addresses_that_bring_nobody_are_worth_no_more_than_a_few",
    ),
    Mutation(
        "many connections, one after the other",
        "p2pcast/transport/stripe.py",
        "        self._transport = None\n        for error in",
        "        for error in",
        TLS + "test_whoever_was_shown_out_leaves_nothing_in_memory",
    ),
    Mutation(
        "all descriptors",
        DOOR,
        "                loop.call_later(EXHAUSTED_S, self._attend, sock)",
        "                pass",
        TLS + "test_without_descriptors_it_waits_and_goes_on",
    ),
    Mutation(
        "many silent connections",
        "p2pcast/transport/stripe.py",
        'self.close(RemoteError(f"no handshake within {self._handshake_s:g} s"))',
        "pass",
        LISTENER + "test_slow_strangers_are_closed",
    ),
    Mutation(
        "many joins with one token",
        GRANTS,
        "if len(self.holders) >= limits.MAX_HOLDERS and node.hex() not in self.holders:",
        "if False:",
        LEDGER + "test_it_does_not_grow_for_ever",
    ),
    Mutation(
        "many joins with one token",
        GRANTS,
        "if len(self.grants) >= limits.MAX_TOKENS:",
        "if False:",
        LEDGER + "test_it_does_not_grow_for_ever",
    ),
    Mutation(
        "many joins with one token",
        "trainer_node/admission.py",
        "        if self._asked:\n",
        "        if False:\n",
        TRUST + "test_one_connection_buys_one_certificate",
    ),
    Mutation(
        "HTTP: slow heads, many readers, large bodies",
        "p2pcast/http_door.py",
        "loop.call_later(SILENT_S, self._turn_out, handler)",
        "loop.call_later(1e6, self._turn_out, handler)",
        HTTP + "test_who_does_not_ask_is_shown_out",
    ),
    Mutation(
        "HTTP: slow heads, many readers, large bodies",
        "p2pcast/http_door.py",
        "        if len(self._silent) > MAX_SILENT_CONNECTIONS:",
        "        if False:",
        HTTP + "test_a_flood_of_silent_connections_pushes_itself_out",
    ),
    Mutation(
        "HTTP: slow heads, many readers, large bodies",
        "p2pcast/http_door.py",
        "        if len(self._server.connections) >= MAX_HTTP_CONNECTIONS:",
        "        if False:",
        HTTP + "test_there_are_not_too_many_connections",
    ),
    Mutation(
        "HTTP: slow heads, many readers, large bodies",
        SERVER,
        "        if events.readers >= MAX_READERS:",
        "        if False:",
        HTTP + "test_readers_are_counted_and_there_are_not_too_many",
    ),
    Mutation(
        "HTTP: slow heads, many readers, large bodies",
        SERVER,
        "        if self._waiting >= MAX_WAITERS:",
        "        if False:",
        HTTP + "test_there_are_not_too_many_that_wait",
    ),
    Mutation(
        "HTTP: slow heads, many readers, large bodies",
        SERVER,
        "                async with asyncio.timeout(SLOW_S):",
        "                async with asyncio.timeout(1e6):",
        HTTP + "test_a_reader_that_takes_nothing_is_dropped",
    ),
    Mutation(
        "HTTP: slow heads, many readers, large bodies",
        SERVER,
        "                async with asyncio.timeout(BODY_S):",
        "                async with asyncio.timeout(1e6):",
        HTTP + "test_a_body_that_does_not_come",
    ),
]

SAID = [
    Mutation(
        "test_who_may_ask_from_elsewhere",
        SERVER,
        '            if not is_loopback(request.remote or ""):\n                return',
        "            if False:\n                return",
        "tests/daemons/test_http.py::test_who_may_ask_from_elsewhere",
    ),
    Mutation(
        "test_a_token_is_made_on_the_hubs_own_machine_alone",
        SERVER,
        'if only_here and not is_loopback(request.remote or ""):',
        "if False:",
        TRUST + "test_a_token_is_made_on_the_hubs_own_machine_alone",
    ),
    Mutation(
        "(origins)",
        SERVER,
        "            if not _by_itself(request):",
        "            if False:",
        HTTP + "test_a_browser_cannot_be_made_to_speak_for_its_user",
    ),
    Mutation(
        "No secret is in a log",
        "trainer_node/admission.py",
        'await self._owner.blocking(atomic_write, self._state / "trust.json", text, 0o600)',
        'await self._owner.blocking(atomic_write, self._state / "trust.json", text, 0o644)',
        TRUST + "test_no_secret_is_told_and_keys_are_their_owners_alone",
    ),
    Mutation(
        "No secret is in a log",
        "p2pcast/wire/token.py",
        'return f"Token(run={self.run.hex()}, secret=…)"',
        'return f"Token(run={self.run.hex()}, secret={self.secret.hex()})"',
        "tests/p2pcast/wire/test_handshake.py::test_the_secret_is_shown_nowhere",
    ),
    Mutation(
        "No secret is in a log",
        "p2pcast/wire/token.py",
        'raise UsageError(f"that is not a join token: it',
        'raise UsageError(f"{text} is not a join token: it',
        "tests/p2pcast/wire/test_token.py::test_what_is_not_a_token_is_not_repeated",
    ),
]

MUTATIONS = [*GETTING_IN, *FROM_INSIDE, *MIRRORS, *WEARING_OUT, *SAID]
