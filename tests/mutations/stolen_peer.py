"""Defences against tasks that die in silence, and against a stolen peer at an engine on several hosts."""

from __future__ import annotations

from mutation import Mutation

TASKS = "p2pcast/process/background_tasks.py"
LEAD = "rollout_node/engine/multi_host_leader.py"
SPANS = "trainer_node/membership/multi_host_engines.py"
IN_DAEMONS = "tests/daemons/hub/test_tasks.py::"
IN_TASKS = "tests/p2pcast/process/test_background_tasks.py::"
UPLINK = "tests/trainer_node/sdk/test_hub_connection.py::"
HOSTS = "tests/daemons/engines/test_hosts.py::"
AT_A_LEAD = "tests/rollout_node/engine/multi_host/test_stolen_member.py::"
IN_SPANS = "tests/trainer_node/membership/test_multi_host_engines.py::"

OWN_WORK = "the daemon's own work"
ONE_LINK = "the work for one connection"
ENGINES = "posing as a member of an engine on several hosts"
PLACE = "taking the place of an engine's lead"

STOLEN_PEER = [
    Mutation(
        OWN_WORK,
        TASKS,
        "            self.fail(task.get_name(), error, fatal=vital)",
        "            self.failed += 1",
        IN_DAEMONS + "test_a_hub_that_fails_to_seal_ends_and_its_publish_does_not_hang",
    ),
    Mutation(
        OWN_WORK,
        "trainer_node/publish/version_sealer.py",
        '            holding.fail_seal(LocalError(f"version {version} could not be sealed: {type(error).__name__}"))\n',
        "            del error\n",
        IN_DAEMONS + "test_a_hub_that_fails_to_seal_ends_and_its_publish_does_not_hang",
    ),
    Mutation(
        OWN_WORK,
        TASKS,
        "            self.fail(task.get_name(), error, fatal=vital)",
        "            self.fail(task.get_name(), error)",
        IN_DAEMONS + "test_a_peer_that_fails_with_a_version_ends",
    ),
    Mutation(
        OWN_WORK,
        TASKS,
        "        elif vital and isinstance(error, LocalError):",
        "        elif False:",
        IN_DAEMONS + "test_an_eviction_that_a_peer_cannot_write_is_reported",
    ),
    Mutation(
        OWN_WORK,
        TASKS,
        "            raise self._tasks.fail(name, error, fatal=True) from error",
        "            del name",
        IN_DAEMONS + "test_keepalives_that_fail_end_the_daemon",
    ),
    Mutation(
        OWN_WORK,
        TASKS,
        "            self._fatal.set_exception(_daemon_ended(self._first))",
        "            self._fatal.set_exception(RuntimeError(self._first.why))",
        IN_DAEMONS + "test_the_process_ends_with_one_line_that_names_the_task",
    ),
    Mutation(
        OWN_WORK,
        TASKS,
        "            if not ends:",
        "            if False:",
        IN_TASKS + "test_a_daemon_loop_that_ends_is_a_failure",
    ),
    Mutation(
        ONE_LINK,
        "p2pcast/transport/stripe.py",
        '            raise RuntimeError(f"{type(error).__name__}: {error}") from error',
        "            raise",
        IN_DAEMONS + "test_an_error_of_the_system_in_a_message_is_not_taken_for_the_connections_own",
    ),
    Mutation(
        ONE_LINK,
        "p2pcast/daemon/http_server.py",
        "        healthy, why = self._view.healthy()",
        '        healthy, why = True, ""',
        IN_DAEMONS + "test_a_message_that_the_hub_fails_to_handle_ends_its_link_and_is_reported",
    ),
    Mutation(
        ONE_LINK,
        TASKS,
        "            loop.set_exception_handler(_handle_loop_error)",
        "            loop.set_exception_handler(None)",
        IN_DAEMONS + "test_a_failed_timer_is_reported",
    ),
    Mutation(
        ONE_LINK,
        "trainer_node/admission/admission.py",
        'f"renew {session.link.name}", vital=False)',
        'f"renew {session.link.name}")',
        IN_DAEMONS + "test_a_failed_certificate_issue_ends_its_link_and_is_reported",
    ),
    Mutation(
        ONE_LINK,
        TASKS,
        "    task.add_done_callback(_report_result)\n",
        "    task.add_done_callback(lambda task: task.exception())\n",
        IN_DAEMONS + "test_a_failed_read_ahead_ends_that_childs_link_and_is_reported",
    ),
    Mutation(
        ONE_LINK,
        TASKS,
        "        threading.excepthook = hook\n",
        "",
        IN_TASKS + "test_a_failed_thread_is_recorded",
    ),
    Mutation(
        "a publisher's thread",
        "trainer_node/sdk/hub_connection.py",
        '            self._failed(self._loop, {"message": "the publisher\'s thread failed", "exception": error})',
        "            del error",
        UPLINK + "test_a_publisher_whose_thread_fails_to_start_raises_an_error",
    ),
    Mutation(
        "a publisher's thread",
        "trainer_node/sdk/hub_connection.py",
        "                self._loop.set_exception_handler(self._failed)\n",
        "",
        UPLINK + "test_a_callback_that_fails_on_the_publishers_loop_ends_the_wait_and_the_connection",
    ),
    Mutation(
        ENGINES,
        LEAD,
        "        if node not in self._roster:",
        "        if False:",
        AT_A_LEAD + "test_a_peer_that_the_hub_does_not_name_is_no_member",
    ),
    Mutation(
        ENGINES,
        LEAD,
        "        self._check_named(link.remote)\n",
        "",
        HOSTS + "test_a_peer_that_joined_as_no_member_is_none",
    ),
    Mutation(
        ENGINES,
        LEAD,
        "s.standing for node, s in self._members.items() if node in working",
        "s.standing for node, s in self._members.items()",
        HOSTS + "test_a_peer_that_claims_to_be_a_member_neither_stalls_nor_speaks_for_the_engine",
    ),
    Mutation(
        ENGINES,
        LEAD,
        "s.standing for node, s in self._members.items() if node in working",
        "s.standing for node, s in self._members.items()",
        AT_A_LEAD + "test_a_member_without_a_worker_is_not_waited_for",
    ),
    Mutation(
        ENGINES,
        "rollout_node/installers/install_socket.py",
        "        if claim is not None and awaited:",
        "        if claim is not None:",
        AT_A_LEAD + "test_an_unasked_report_is_no_claim_to_a_rank",
    ),
    Mutation(
        ENGINES,
        LEAD,
        "        if owner is not None and rank not in self._movable_ranks:",
        "        if False:",
        AT_A_LEAD + "test_no_rank_is_claimed_by_two_members",
    ),
    Mutation(
        PLACE,
        SPANS,
        '        if known is None and claimant not in ("", ident) and now - since < CLAIM_S:',
        "        if False:",
        IN_SPANS + "test_the_name_of_an_engine_is_kept_for_a_lead_that_is_away",
    ),
    Mutation(
        PLACE,
        "trainer_node/hub_startup.py",
        "    leads.recall()\n",
        "",
        HOSTS + "test_the_place_of_a_lead_that_is_away_is_kept_also_by_a_hub_that_was_restarted",
    ),
]
