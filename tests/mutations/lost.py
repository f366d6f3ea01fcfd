"""Defences where files are lost, or an older copy of them comes back: docs/threats.md, What is lost or old."""

from __future__ import annotations

from mutation import ADMISSION, EVICTED, EVICTIONS, LEDGER, STATEMENTS, TOKENS, Mutation

HEEDING = "rollout_node/heeding.py"

LOST = [
    Mutation(
        "a hub's list of the evicted",
        "trainer_node/hearing.py",
        '            self._owner.learn_evictions(body["evicted"])',
        "            pass",
        EVICTED + "test_a_hub_that_lost_its_files_learns_evictions_from_its_peers",
    ),
    Mutation(
        "a hub's list of the evicted",
        HEEDING,
        '            evictions.heard(body["signed"])\n',
        "",
        EVICTED + "test_a_hub_that_lost_its_files_learns_evictions_from_its_peers",
    ),
    Mutation(
        "a hub's list of the evicted",
        ADMISSION,
        "        self._ledger.strike(self._evictions.tokens)\n        for statement in news:",
        "        for statement in news:",
        EVICTED + "test_a_hub_with_an_older_copy_of_its_files_revokes_the_tokens_again",
    ),
    Mutation(
        "a hub's list of the evicted",
        HEEDING,
        '        if "signed" not in body:\n',
        '        if "signed" not in body:\n            evictions.nodes.intersection_update(body["nodes"])\n',
        EVICTED + "test_a_list_that_is_empty_or_short_makes_no_peer_forget",
    ),
    Mutation(
        "a hub's list of the evicted",
        STATEMENTS,
        "        return [s.packed for s in some if s.genuine(public)]",
        "        return [s.packed for s in some]",
        EVICTIONS + "test_statements_of_another_run_are_not_brought_to_this_one",
    ),
    Mutation(
        "what an earlier release had written",
        ADMISSION,
        "        for node, name in self._ledger.legacy.items():",
        "        for node, name in ():",
        EVICTED + "test_evictions_of_an_earlier_release_are_taken_over",
    ),
    Mutation(
        "what an earlier release had written",
        ADMISSION,
        "            if not self._evictions.knows(bytes.fromhex(node)):",
        "            if True:",
        EVICTED + "test_evictions_of_an_earlier_release_are_taken_over",
    ),
    Mutation(
        "what an earlier release had written",
        "p2pcast/trust/ledger.py",
        "            found.expires = now + LEGACY_TTL_S",
        "            pass",
        LEDGER + "test_an_old_ledger_opens_without_loss",
    ),
    Mutation(
        "whom a hub has admitted",
        "rollout_node/control.py",
        " and not (self._papers is not None and self._papers.renewal_refused())",
        "",
        TOKENS + "test_a_refused_renewal_leads_to_a_new_certificate_and_ends_nobody",
    ),
    Mutation(
        "whom a hub has admitted",
        "rollout_node/papers.py",
        "            if held is None or not self._was_in or isinstance(error, UntrustedError):",
        "            if True:",
        TOKENS + "test_a_peer_without_renewal_and_without_a_token_stays_while_its_certificate_lasts",
    ),
    Mutation(
        "whom a hub has admitted",
        "rollout_node/papers.py",
        "            if held.expired(now):\n                raise RetryableError(",
        "            if held.expired(now):\n                raise RefusedError(",
        TOKENS + "test_no_loss_ends_a_peer_that_was_in",
    ),
    Mutation(
        "whom a hub has admitted",
        ADMISSION,
        "            news = self._ledger.adopt(link.remote, key, name, now, until)",
        "            news = self._ledger.adopt(link.remote, 'x', name, now, until)",
        TOKENS + "test_a_hub_that_lost_its_ledger_renews_what_it_has_issued",
    ),
    Mutation(
        "whom a hub has admitted",
        ADMISSION,
        "            key, until = key_print(held_key(certificate)),",
        "            key, until = '',",
        TOKENS + "test_renewal_over_a_stolen_connection_is_for_the_key_of_its_certificate",
    ),
    Mutation(
        "whom a hub has admitted",
        "trainer_node/badge.py",
        "                if self._held is None or self._held.expired(time.time()):",
        "                if True:",
        TOKENS + "test_a_trainer_goes_on_by_its_key",
    ),
]
