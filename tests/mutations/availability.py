"""Defences of runs that continue: while the hub is away, below a parent that sends nothing, beside a node that delays
the others (docs/design/faults.md, docs/design/security.md).
"""

from __future__ import annotations

from mutation import STOLEN_CERTIFICATES, Mutation

AWAY = "tests/daemons/peer/test_hub_away.py::"
FALSE_REPORTS = "tests/daemons/trust/test_false_reports.py::"
OVERDUE = "tests/daemons/intake/test_overdue.py::"
PACE = "tests/trainer_node/publish/test_backpressure.py::"
WITHHOLDING = "tests/topology/test_withholding.py::"
RUN_KEY = "rollout_node/control/run_key_source.py"
PEER = "rollout_node/peer.py"
STARTED = "a peer is started while the hub is away"
BACK = "a peer is started while the hub is away, and its newest version is lost"
FIRST = "a peer joins for the first time while the hub is away"
STALE = "a peer's information grows old"
SENDS_NOTHING = "delaying the peers below"
KEEPS_WAITING = "a rank hangs or never comes"
HOLDS_BACK = "delaying training with `--max-lag`"

AVAILABILITY = [
    Mutation(
        STARTED,
        RUN_KEY,
        "            if kept is not None:\n                return self._resume(kept, failed)",
        "            if False:\n                return self._resume(kept, failed)",
        AWAY + "test_a_peer_starts_without_its_hub_and_feeds_an_engine",
    ),
    Mutation(
        STARTED,
        "rollout_node/control/saved_hub_state.py",
        "len(key) == KEY_BYTES and run_id(key) == self._run",
        "len(key) == KEY_BYTES",
        AWAY + "test_a_key_that_the_token_does_not_pin_is_not_used",
    ),
    Mutation(
        STARTED,
        "rollout_node/stage/first_shadow.py",
        "        if known is None and not self._catalog.complete.is_set():",
        "        if False:",
        AWAY + "test_a_good_shadow_is_not_thrown_away_because_the_hub_is_away",
    ),
    Mutation(
        STARTED,
        "rollout_node/control/hub_orders.py",
        "        self.commits, self.target, self.hold = self._saved.commit, self._saved.target, self._saved.hold",
        "        pass",
        AWAY + "test_without_the_hub_engines_still_wait_for_its_command",
    ),
    Mutation(
        STARTED,
        "rollout_node/sync/ingest.py",
        "            upstream.want_newer()",
        "            pass",
        AWAY + "test_a_peer_gets_missed_versions_from_the_swarm_without_the_hub",
    ),
    Mutation(
        STARTED,
        PEER,
        "        relay.parent_failover.recall(parent, backups, neighbours)",
        "        pass",
        AWAY + "test_a_peer_gets_missed_versions_from_the_swarm_without_the_hub",
    ),
    Mutation(
        STARTED,
        PEER,
        "        engine.member.set_lead(startup.saved.lead)",
        "        pass",
        "tests/daemons/engines/test_hosts.py::test_a_member_started_without_the_hub_dials_its_saved_lead",
    ),
    Mutation(
        BACK,
        "rollout_node/sync/version_path.py",
        "unsure = not self.catalog.listed or ",
        "unsure = ",
        AWAY + "test_without_the_hub_a_damaged_disk_takes_no_engine_back",
    ),
    Mutation(
        BACK,
        "rollout_node/engine/commit_permission.py",
        "        return not self._catalog.listed or any(known >= newest for known in self._catalog.states())",
        "        return False",
        AWAY + "test_without_the_hub_no_engine_gets_less_than_was_staged_before",
    ),
    Mutation(
        FIRST,
        RUN_KEY,
        "            if left_s <= 0:",
        "            if True:",
        AWAY + "test_a_first_join_keeps_trying_until_the_hub_is_there",
    ),
    Mutation(
        FIRST,
        RUN_KEY,
        "            if left_s <= 0:",
        "            if False:",
        AWAY + "test_a_first_join_gives_up_after_its_time",
    ),
    Mutation(
        "the hub is out of reach when the Publisher is made",
        "trainer_node/sdk/hub_connection.py",
        "if self._stop.is_set() or time.monotonic() >= self._until:",
        "if True:",
        "tests/trainer_node/sdk/test_hub_connection.py::test_a_hub_that_is_being_restarted_is_waited_for",
    ),
    Mutation(
        STALE,
        "rollout_node/control/freshness.py",
        "if self._newest is None or version > self._newest:",
        "if True:",
        "tests/rollout_node/control/test_freshness.py::test_only_a_version_newer_than_all_before_makes_knowledge_fresher",
    ),
    Mutation(
        STALE,
        "rollout_node/peer_view.py",
        '            found.append({"level": "alarm", "words": stale})',
        "            pass",
        AWAY + "test_a_peer_whose_knowledge_is_too_old_is_unready",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/sync/stalls.py",
        "            if now - since > row.patience_s:",
        "            if False:",
        FALSE_REPORTS + "test_a_withheld_version_comes_from_elsewhere_and_the_parent_is_demoted",
    ),
    Mutation(
        SENDS_NOTHING,
        "p2pcast/relay/upstream.py",
        "        if artifact in self.withheld:\n            # This parent's announcement",
        "        if False:\n            # This parent's announcement",
        "tests/p2pcast/relay/test_upstream.py::test_a_parent_that_withholds_an_artifact_is_not_asked_to_decline",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/sync/missing_versions.py",
        "            if self._opened.count(False) >= MISSES:",
        "            if False:",
        FALSE_REPORTS + "test_a_parent_that_opens_no_version_is_demoted",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/sync/version_path.py",
        "(not needs_source(holding) and self.node.is_listed(holding.id))",
        "not needs_source(holding)",
        STOLEN_CERTIFICATES + "test_an_unlisted_artifact_is_not_waited_for",
    ),
    Mutation(
        SENDS_NOTHING,
        "p2pcast/relay/upstream.py",
        "            if self.node.is_sealed(holding.id):",
        "            if False:",
        FALSE_REPORTS + "test_a_parent_that_aborts_sealed_versions_delays_no_peer",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/sync/missing_versions.py",
        " or artifact in live.wanted)",
        ")",
        FALSE_REPORTS + "test_a_parent_that_offers_and_does_not_send_is_not_waited_for",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/sync/ingest.py",
        "            self.node.confirm(holding, entry.durable)",
        "            pass",
        FALSE_REPORTS + "test_a_parent_that_withholds_the_durable_record_delays_no_peer",
    ),
    Mutation(
        SENDS_NOTHING,
        "topology/withholding.py",
        "        if (node, artifact) in self._complaints:",
        "        if False:",
        FALSE_REPORTS + "test_a_peer_below_a_withholding_parent_is_not_blamed",
    ),
    Mutation(
        SENDS_NOTHING,
        "topology/withholding.py",
        "now_s - complaint.since_s >= GRACE_S",
        "True",
        WITHHOLDING + "test_of_a_chain_that_waits_the_topmost_that_does_not_complain_is_to_blame",
    ),
    Mutation(
        SENDS_NOTHING,
        "topology/withholding.py",
        "            if len(excused) < EXCUSES:",
        "            if True:",
        WITHHOLDING + "test_a_peer_that_always_lacks_awaited_artifacts_is_blamed_in_the_end",
    ),
    Mutation(
        "demoting other nodes by complaints",
        "topology/withholding.py",
        " and len(self._incidents.get(node, ())) >= INCIDENTS",
        "",
        WITHHOLDING + "test_one_witness_costs_a_place_for_a_while_and_two_over_two_versions_for_good",
    ),
    Mutation(
        "demoting other nodes by complaints",
        "trainer_node/membership/membership.py",
        "parent if parent == above else None",
        "parent",
        "tests/trainer_node/membership/test_withheld.py::test_a_report_of_lacking_artifacts_counts_against_the_own_parent_alone",
    ),
    Mutation(
        "demoting other nodes by complaints",
        "trainer_node/membership/report_handler.py",
        "for artifact, parent in body.lacking if self._is_sealed(artifact)]",
        "for artifact, parent in body.lacking]",
        FALSE_REPORTS + "test_complaints_about_unsealed_artifacts_are_ignored",
    ),
    Mutation(
        KEEPS_WAITING,
        "trainer_node/ranks/rank_intake.py",
        "            awaited = dict.fromkeys(group.silent)",
        "            awaited = {}",
        OVERDUE + "test_an_incomplete_rank_group_is_ended",
    ),
    Mutation(
        KEEPS_WAITING,
        "trainer_node/ranks/rank_intake.py",
        "        elif pending is None:\n            self._abort(group, str(error))",
        "        elif pending is None:\n            pass",
        OVERDUE + "test_a_rank_that_does_not_begin_is_not_waited_for",
    ),
    Mutation(
        KEEPS_WAITING,
        "trainer_node/ranks/rank_intake.py",
        "        else:\n            pending.fail(error)",
        "        else:\n            pass",
        OVERDUE + "test_a_rank_that_hangs_after_begin_does_not_keep_the_turn",
    ),
    Mutation(
        HOLDS_BACK,
        "trainer_node/publish/backpressure.py",
        "            if self._wait_s and now - since >= self._wait_s:",
        "            if False:",
        PACE + "test_no_peer_is_waited_for_for_ever",
    ),
    Mutation(
        HOLDS_BACK,
        "trainer_node/publish/backpressure.py",
        "[engine for engine in peer.engines if engine.started]",
        "list(peer.engines)",
        PACE + "test_peers_without_reachable_engines_and_detached_peers_are_not_waited_for",
    ),
    Mutation(
        HOLDS_BACK,
        "trainer_node/publish/backpressure.py",
        "            if peer.ident in detached:",
        "            if False:",
        PACE + "test_peers_without_reachable_engines_and_detached_peers_are_not_waited_for",
    ),
    Mutation(
        "ending the barrier's rounds",
        "trainer_node/commit/barrier.py",
        "any(not self._engine(key).is_beyond(newest) for key in past)",
        "past",
        "tests/trainer_node/commit/test_barrier.py::test_a_report_of_an_unsealed_version_ends_no_round",
    ),
]
