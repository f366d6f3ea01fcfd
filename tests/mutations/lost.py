"""Defences where files are lost, or an older copy of them comes back: docs/design/security.md, What is lost or old."""

from __future__ import annotations

from mutation import ADMISSION, EVICTED, EVICTIONS, LEDGER, STATEMENTS, TOKENS, TRUST_STATE, Mutation

EVICTION_HANDLER = "rollout_node/control/eviction_handler.py"

HUB_BACKUP = "tests/trainer_node/backup/test_hub_backup.py::"
LEDGER_BACKUP = "tests/trainer_node/backup/test_ledger_backup.py::"
REPLACED = "tests/daemons/trust/test_replaced_authority.py::"

LOST = [
    Mutation(
        "the hub's clock: it is wrong for a while",
        TRUST_STATE,
        "        self.ledger.ages_count = self.clock.settled\n",
        "",
        "tests/daemons/trust/test_trust.py::test_a_clock_that_is_wrong_for_a_moment_forgets_no_admission",
    ),
    Mutation(
        "the hub's clock: it is wrong for a while",
        TRUST_STATE,
        "            self.ledger.rebase(now)",
        "            pass",
        "tests/daemons/trust/test_trust.py::test_a_clock_that_is_wrong_for_a_moment_forgets_no_admission",
    ),
    Mutation(
        "a restored hub's numbers of the time after its backup",
        "trainer_node/backup/hub_backup.py",
        "        numbers.above(floor if branch is None else branch - 1)\n",
        "",
        HUB_BACKUP + "test_restored_hub_names_no_version_that_was_used_after_the_backup",
    ),
    Mutation(
        "a restored hub's numbers of the time after its backup",
        "trainer_node/backup/hub_backup.py",
        "*known, *given])",
        "*known])",
        HUB_BACKUP + "test_restoring_again_opens_another_branch",
    ),
    Mutation(
        "files of a backup, cut or changed",
        "trainer_node/backup/run_backup.py",
        "    backup.check()\n",
        "",
        HUB_BACKUP + "test_damaged_backups_are_refused",
    ),
    Mutation(
        "files of a backup, cut or changed",
        "trainer_node/backup/backup_folder.py",
        '    if not path.is_file():\n        raise UsageError(f"{root} is no backup',
        '    if False:\n        raise UsageError(f"{root} is no backup',
        HUB_BACKUP + "test_backup_that_dies_at_any_step_is_no_backup",
    ),
    Mutation(
        "the authority's key, replaced because it leaked",
        "p2pcast/transport/node_certificate.py",
        "kept_key(state / KEY) if found is None else found.key",
        "new_key() if found is None else found.key",
        REPLACED + "test_workers_and_ledgers_stay_the_same_nodes",
    ),
    Mutation(
        "the ledger's rows of the time after its backup",
        "trainer_node/backup/ledger_backup.py",
        "        drop(conn, now, bytes(group), LOST)",
        "        pass",
        LEDGER_BACKUP + "test_learner_ahead_of_the_backup_trains_no_result_again",
    ),
    Mutation(
        "the ledger's rows of the time after its backup",
        "trainer_node/backup/ledger_backup.py",
        "    conn.execute(delete(db.batches).where(db.batches.c.id.in_(batches)))\n",
        "",
        LEDGER_BACKUP + "test_cut_batch_of_the_backup_is_forgotten_if_the_learner_is_ahead",
    ),
    Mutation(
        "the ledger's rows of the time after its backup",
        "trainer_node/ledger/resuming.py",
        "and unknown and batch not in contained:",
        "and False:",
        LEDGER_BACKUP + "test_learner_of_another_lineage_is_refused",
    ),
    Mutation(
        "the authority's key, replaced because it leaked",
        "rollout_node/control/peer_certificate.py",
        "key = self._kept.key or await self._blocking(kept_key, self._kept.path.with_name(KEY))",
        'key = __import__("p2pcast.trust.certificates", fromlist=["x"]).new_key()',
        REPLACED + "test_peers_stay_and_a_stolen_authority_opens_nothing",
    ),
    Mutation(
        "a hub's list of evicted nodes",
        "trainer_node/membership/report_handler.py",
        "            self._learn_evictions(body.evicted)",
        "            pass",
        EVICTED + "test_a_hub_that_lost_its_files_learns_evictions_from_its_peers",
    ),
    Mutation(
        "a hub's list of evicted nodes",
        EVICTION_HANDLER,
        "            evictions.note_stated(body.signed)\n",
        "",
        EVICTED + "test_a_hub_that_lost_its_files_learns_evictions_from_its_peers",
    ),
    Mutation(
        "a hub's list of evicted nodes",
        TRUST_STATE,
        "        if news:\n            self.ledger.strike(self.evictions.tokens)\n",
        "",
        EVICTED + "test_a_hub_with_an_older_copy_of_its_files_revokes_the_tokens_again",
    ),
    Mutation(
        "a hub's list of evicted nodes",
        EVICTION_HANDLER,
        "        if body.signed is None:\n",
        "        if body.signed is None:\n            evictions.nodes.intersection_update(body.nodes)\n",
        EVICTED + "test_a_list_that_is_empty_or_short_makes_no_peer_forget",
    ),
    Mutation(
        "a hub's list of evicted nodes",
        STATEMENTS,
        "        return [s.packed for s in some if s.genuine(public)]",
        "        return [s.packed for s in some]",
        EVICTIONS + "test_statements_of_another_run_are_not_sent",
    ),
    Mutation(
        "files of an earlier release",
        TRUST_STATE,
        "        for node, name in self.ledger.legacy.items():",
        "        for node, name in ():",
        EVICTED + "test_evictions_of_an_earlier_release_are_taken_over",
    ),
    Mutation(
        "files of an earlier release",
        TRUST_STATE,
        "            if not self.evictions.knows(bytes.fromhex(node)):",
        "            if True:",
        EVICTED + "test_evictions_of_an_earlier_release_are_taken_over",
    ),
    Mutation(
        "files of an earlier release",
        "p2pcast/trust/token_register.py",
        "            found.expires = now + LEGACY_TTL_S",
        "            pass",
        LEDGER + "test_an_old_ledger_opens_without_loss",
    ),
    Mutation(
        "the hub's record of admitted nodes",
        "rollout_node/control/hub_session.py",
        " and not self._renewal_refused()",
        "",
        TOKENS + "test_a_refused_renewal_leads_to_a_new_certificate_and_keeps_the_link",
    ),
    Mutation(
        "the hub's record of admitted nodes",
        "rollout_node/control/peer_certificate.py",
        "            if held is None or not self._kept.was_in_force or isinstance(error, UntrustedError):",
        "            if True:",
        TOKENS + "test_a_peer_without_renewal_and_without_a_token_stays_while_its_certificate_lasts",
    ),
    Mutation(
        "the hub's record of admitted nodes",
        "rollout_node/control/peer_certificate.py",
        "            if not held.in_force(now):\n                raise RetryableError(",
        "            if not held.in_force(now):\n                raise RefusedError(",
        TOKENS + "test_no_loss_of_files_ends_an_admitted_peer",
    ),
    Mutation(
        "the hub's record of admitted nodes",
        ADMISSION,
        "            news = ledger.adopt(link.remote, key, name, now, until)",
        "            news = ledger.adopt(link.remote, 'x', name, now, until)",
        TOKENS + "test_a_hub_that_lost_its_ledger_renews_its_certificates",
    ),
    Mutation(
        "the hub's record of admitted nodes",
        ADMISSION,
        "            key, until = key_print(held_key(certificate)),",
        "            key, until = '',",
        TOKENS + "test_renewal_over_a_stolen_connection_is_for_the_key_of_its_certificate",
    ),
    Mutation(
        "the hub's record of admitted nodes",
        "p2pcast/ledger_api/trainer_certificate.py",
        "                if self._held is None or not self._held.in_force(time.time()):",
        "                if True:",
        TOKENS + "test_a_trainer_goes_on_by_its_key",
    ),
]
