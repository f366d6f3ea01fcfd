"""Defences of runs that go on: while the hub is away, below a parent that sends nothing, beside somebody who keeps the others waiting (docs/faults.md, docs/threats.md)."""

from __future__ import annotations

from mutation import THIEVES, Mutation

AWAY = "tests/daemons/test_hub_away.py::"
LIARS = "tests/daemons/test_liars.py::"
OVERDUE = "tests/daemons/intake/test_overdue.py::"
PACE = "tests/trainer_node/test_pace.py::"
WITHHOLDING = "tests/topology/test_withholding.py::"
HEEDING = "rollout_node/heeding.py"
PEER = "rollout_node/peer.py"
STARTED = "a peer is started while the hub is away"
BACK = "a peer is started while the hub is away, and its newest version is lost"
FIRST = "a peer joins for the first time while the hub is away"
STALE = "what a peer knows grows old"
SENDS_NOTHING = "to hold up those below it, by sending nothing and saying that it has nothing"
KEEPS_WAITING = "a rank lives and does not get on, or never comes"
HOLDS_BACK = "to hold back training with `--max-lag`, by never getting on"

STAYING = [
    Mutation(
        STARTED,
        HEEDING,
        "            if kept is not None:\n                return self._go_on_alone(kept, failed)",
        "            if False:\n                return self._go_on_alone(kept, failed)",
        AWAY + "test_a_peer_starts_without_its_hub_and_feeds_an_engine",
    ),
    Mutation(
        STARTED,
        "rollout_node/remembering.py",
        "len(key) == KEY_BYTES and run_id(key) == self._run",
        "len(key) == KEY_BYTES",
        AWAY + "test_a_key_that_the_token_does_not_pin_is_not_used",
    ),
    Mutation(
        STARTED,
        "rollout_node/following.py",
        "            if known is None and not self._peer.catalog.complete.is_set():",
        "            if False:",
        AWAY + "test_a_good_shadow_is_not_thrown_away_because_the_hub_is_away",
    ),
    Mutation(
        STARTED,
        PEER,
        "        self.commits, self.target, self.wayfinding.hold = known.commit, known.target, known.hold",
        "        pass",
        AWAY + "test_without_the_hub_engines_still_wait_for_its_command",
    ),
    Mutation(
        STARTED,
        "rollout_node/receiving.py",
        "            upstream.want_newer()",
        "            pass",
        AWAY + "test_a_peer_gets_from_the_swarm_what_it_missed_while_both_it_and_the_hub_were_away",
    ),
    Mutation(
        STARTED,
        PEER,
        "            self.attachment.recall(parent, backups, neighbours)",
        "            pass",
        AWAY + "test_a_peer_gets_from_the_swarm_what_it_missed_while_both_it_and_the_hub_were_away",
    ),
    Mutation(
        STARTED,
        PEER,
        "            self.member.lead_is(self.remembering.lead)",
        "            pass",
        "tests/daemons/test_hosts.py::test_a_member_that_is_started_without_the_hub_goes_to_the_lead_that_it_had",
    ),
    Mutation(
        BACK,
        "rollout_node/wayfinding.py",
        "unsure = not self._peer.catalog.listed or (",
        "unsure = (",
        AWAY + "test_without_the_hub_a_damaged_disk_takes_no_engine_back",
    ),
    Mutation(
        BACK,
        PEER,
        "        return not self.catalog.listed or any(known >= newest for known in self.catalog.states())",
        "        return False",
        AWAY + "test_without_the_hub_no_engine_gets_less_than_was_staged_before",
    ),
    Mutation(
        FIRST,
        HEEDING,
        "            if left_s <= 0:",
        "            if True:",
        AWAY + "test_a_first_join_keeps_trying_until_the_hub_is_there",
    ),
    Mutation(
        FIRST,
        HEEDING,
        "            if left_s <= 0:",
        "            if False:",
        AWAY + "test_a_first_join_gives_up_after_its_time",
    ),
    Mutation(
        "the hub is out of reach when the Publisher is made",
        "trainer_node/uplink.py",
        "if self._stop.is_set() or time.monotonic() >= self._until:",
        "if True:",
        "tests/trainer_node/publisher/test_uplink.py::test_a_hub_that_is_being_restarted_is_waited_for",
    ),
    Mutation(
        STALE,
        "rollout_node/freshness.py",
        "if self._newest is None or version > self._newest:",
        "if True:",
        "tests/rollout_node/test_freshness.py::test_only_a_version_newer_than_all_before_makes_knowledge_fresher",
    ),
    Mutation(
        STALE,
        "rollout_node/peer_view.py",
        "            return False, stale",
        "            pass",
        AWAY + "test_a_peer_whose_knowledge_is_too_old_is_unready",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/stalls.py",
        "            if now - since > row.patience_s:",
        "            if False:",
        LIARS + "test_what_a_parent_withholds_comes_from_elsewhere_and_it_loses_its_place",
    ),
    Mutation(
        SENDS_NOTHING,
        "p2pcast/relay/upstream.py",
        "        if artifact in self.withheld:\n            # This parent's announcement",
        "        if False:\n            # This parent's announcement",
        LIARS + "test_what_a_parent_withholds_comes_from_elsewhere_and_it_loses_its_place",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/lacking.py",
        "            if self._opened.count(False) >= MISSES:",
        "            if False:",
        LIARS + "test_a_parent_that_opens_nothing_loses_its_place",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/wayfinding.py",
        "(comes and self._peer.node.is_listed(holding.id))",
        "comes",
        THIEVES + "test_a_way_that_the_hub_does_not_list_is_not_waited_for",
    ),
    Mutation(
        SENDS_NOTHING,
        "p2pcast/relay/upstream.py",
        "                if node.is_sealed(holding.id):",
        "                if False:",
        LIARS + "test_a_parent_that_calls_off_what_the_hub_has_sealed_holds_up_nobody",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/lacking.py",
        " or artifact in live.wanted)",
        ")",
        LIARS + "test_a_parent_that_offers_what_it_does_not_send_is_not_waited_for",
    ),
    Mutation(
        SENDS_NOTHING,
        "rollout_node/receiving.py",
        "            peer.node.confirm(holding, entry.durable)",
        "            pass",
        LIARS + "test_a_parent_that_keeps_the_durable_record_to_itself_holds_up_nobody",
    ),
    Mutation(
        SENDS_NOTHING,
        "topology/withholding.py",
        "        if (node, artifact) in self._complaints:",
        "        if False:",
        LIARS + "test_who_stands_between_a_liar_and_those_that_wait_is_not_blamed",
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
        WITHHOLDING + "test_a_peer_that_always_lacks_what_others_wait_for_is_to_blame_in_the_end",
    ),
    Mutation(
        "to have others lose their place, by complaining of them",
        "topology/withholding.py",
        " and len(self._incidents.get(node, ())) >= INCIDENTS",
        "",
        WITHHOLDING + "test_one_witness_costs_a_place_for_a_while_and_two_over_two_versions_for_good",
    ),
    Mutation(
        "to have others lose their place, by complaining of them",
        "trainer_node/membership.py",
        "parent if parent == above else None",
        "parent",
        "tests/trainer_node/test_withheld.py::test_a_peer_can_complain_of_its_own_parent_alone",
    ),
    Mutation(
        "to have others lose their place, by complaining of them",
        "trainer_node/hearing.py",
        ' for a, parent in body["lacking"] if self._owner.is_sealed(a)]',
        ' for a, parent in body["lacking"]]',
        LIARS + "test_what_was_never_sealed_can_not_be_complained_of",
    ),
    Mutation(
        KEEPS_WAITING,
        "trainer_node/intake_session.py",
        "            awaited = dict.fromkeys(group.silent)",
        "            awaited = {}",
        OVERDUE + "test_a_group_that_never_gathers_is_ended",
    ),
    Mutation(
        KEEPS_WAITING,
        "trainer_node/intake_session.py",
        "        elif coming is None:\n            self._abort(group, str(error))",
        "        elif coming is None:\n            pass",
        OVERDUE + "test_a_rank_that_does_not_begin_is_not_waited_for",
    ),
    Mutation(
        KEEPS_WAITING,
        "trainer_node/intake_session.py",
        "        else:\n            coming.fail(error)",
        "        else:\n            pass",
        OVERDUE + "test_a_rank_that_hangs_after_it_has_begun_does_not_keep_the_turn",
    ),
    Mutation(
        HOLDS_BACK,
        "trainer_node/pace.py",
        "            if self._wait_s and now - since >= self._wait_s:",
        "            if False:",
        PACE + "test_nobody_is_waited_for_for_ever",
    ),
    Mutation(
        HOLDS_BACK,
        "trainer_node/pace.py",
        "[engine for engine in peer.engines if engine.started]",
        "list(peer.engines)",
        PACE + "test_who_has_no_engine_in_reach_or_is_detached_is_not_waited_for",
    ),
    Mutation(
        HOLDS_BACK,
        "trainer_node/pace.py",
        "            if peer.ident in detached:",
        "            if False:",
        PACE + "test_who_has_no_engine_in_reach_or_is_detached_is_not_waited_for",
    ),
    Mutation(
        "to end the barrier's rounds, by claiming versions that are not sealed",
        "trainer_node/barrier.py",
        "any(not self._engine(key).is_beyond(newest) for key in past)",
        "past",
        "tests/trainer_node/test_barrier.py::test_one_that_claims_what_is_not_sealed_ends_no_round",
    ),
]
