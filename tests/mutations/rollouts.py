"""Defences against workers and against tasks: docs/design/security.md, Rollouts."""

from __future__ import annotations

from mutation import CONTEXTS, TOKEN_LEDGER, Mutation

PLAY = "p2pcast/tasks/play.py"
PROCESS = "p2pcast/tasks/task_process.py"
CHILD = "p2pcast/tasks/child_processes/killable_child.py"
CHECKER = "p2pcast/tasks/task_checker.py"
PLAYS = "tests/p2pcast/tasks/test_play.py::"
CHECKS = "tests/p2pcast/tasks/test_task_process.py::"
SERVER_ROLE = "p2pcast/trust/server_role.py"
SERVERS = "tests/p2pcast/trust/test_server_role.py::"
CALLER = "p2pcast/daemon/http_caller.py"
CALLERS = "tests/p2pcast/daemon/test_http_caller.py::"
NODE = "p2pcast/transport/node_certificate.py"
NODES = "tests/daemons/trust/test_node_certificates.py::"

SETTLING = "trainer_node/ledger/settling.py"
LEASING = "trainer_node/ledger/leasing.py"
LEDGER_RULES = "tests/trainer_node/ledger/test_ledger_rules.py::"
ENDINGS = "tests/trainer_node/ledger/test_ledger_endings.py::"
SHARES = "tests/trainer_node/ledger/test_share_ceiling.py::"
LIES = "tests/trainer_node/ledger/test_lying_worker.py::"
ENGINES = "tests/trainer_node/ledger/test_known_engines.py::"
RATES = "trainer_node/ledger/worker_rates.py"
ESTIMATES = "trainer_node/scheduling/shares.py"
SPLITS = "tests/trainer_node/scheduling/test_shares.py::"
ACCEPTANCE = "trainer_node/ledger/acceptance.py"
GROUNDS = "tests/trainer_node/ledger/test_acceptance.py::test_grounds_of_rejection"
BUDGET = "trainer_node/ledger_server/body_budget.py"
BUDGETS = "tests/trainer_node/ledger_server/test_body_budget.py::"
REQUESTS = "tests/daemons/rollouts/test_ledger_requests.py::"
REPLAYING = "trainer_node/ledger/audits/replaying.py"
REPLAYS = "tests/trainer_node/ledger/test_replaying.py::"
CHOICE = "trainer_node/ledger_server/prompt_choice.py"
CHOICES = "tests/trainer_node/ledger_server/test_prompt_choice.py::"
DESK = "trainer_node/ledger_server/reward_desk.py"
DESKS = "tests/trainer_node/ledger_server/test_reward_desk.py::"
COMPLETIONS = "tests/rollout_node/worker/test_completions_sampler.py::"

ROLLOUTS = [
    Mutation(
        "changes the task's tokens in a play",
        PLAY,
        "if self._token_ids[self._at : end] != list(token_ids) or self._mask[self._at : end].any():",
        "if self._mask[self._at : end].any():",
        PLAYS + "test_a_changed_token_of_the_task_is_refused",
    ),
    Mutation(
        "changes the task's tokens in a play",
        PLAY,
        "if self._token_ids[self._at : end] != list(token_ids) or self._mask[self._at : end].any():",
        "if self._token_ids[self._at : end] != list(token_ids):",
        PLAYS + "test_the_environments_tokens_cannot_be_claimed_as_sampled",
    ),
    Mutation(
        "hangs, with a child that hangs too",
        CHILD,
        "os.killpg(self._process.pid, signal.SIGKILL)",
        "os.kill(self._process.pid, signal.SIGKILL)",
        CHECKS + "test_a_hung_check_is_killed_with_its_children",
    ),
    Mutation(
        "answers `math` with work without end",
        "p2pcast/tasks/math_answers.py",
        "if not comparable(given):",
        "if False:",
        "tests/p2pcast/tasks/test_math_answers.py::test_hostile_answers_reach_no_parser",
    ),
    Mutation(
        "answers `math` with work without end",
        PROCESS,
        "if self.failed_reward is None:",
        "if True:",
        "tests/p2pcast/tasks/test_math_task.py::test_a_comparison_that_hangs_is_ended_and_gives_nothing",
    ),
    Mutation(
        "answers `math` with an undefined value",
        "p2pcast/tasks/math_answers.py",
        "if _undefined(found) and not _undefined(expected):",
        "if False:",
        "tests/p2pcast/tasks/test_math_answers.py::test_an_undefined_value_equals_no_number",
    ),
    Mutation(
        "reads the node's tokens",
        CHILD,
        "for name, value in os.environ.items() if name not in SECRETS",
        "for name, value in os.environ.items()",
        CHECKS + "test_a_check_sees_no_token",
    ),
    Mutation(
        "states false rewards",
        REPLAYING,
        "ended += [(other, distrust) for other in _untrained(conn, _party(row))]",
        "pass",
        REPLAYS + "test_one_wrong_reward_ends_all_untrained_results_of_its_worker",
    ),
    Mutation(
        "states false rewards",
        REPLAYING,
        " or _has_lied(conn, worker)",
        "",
        REPLAYS + "test_a_worker_that_lied_has_each_result_replayed",
    ),
    Mutation(
        "states false rewards",
        REPLAYING,
        "return one if worker.caller == BEARER else db.workers.c.caller == worker.caller",
        "return one",
        REPLAYS + "test_another_name_of_a_certificate_is_no_fresh_start",
    ),
    Mutation(
        "states false rewards",
        REPLAYING,
        "NEW_WORKER * (1 + worker.failed_replays)",
        "NEW_WORKER",
        REPLAYS + "test_a_replay_that_hangs_ends_its_result_and_costs_trust",
    ),
    Mutation(
        "has a false reward trained before its replay",
        "trainer_node/ledger/batching.py",
        "if row.replay == DUE:",
        "if False:",
        REPLAYS + "test_rewards_of_a_new_worker_are_replayed_before_training",
    ),
    Mutation(
        "has a false reward trained before its replay",
        "trainer_node/ledger/batching.py",
        "            leave_out(conn, live[candidate.opened].id)\n",
        "",
        REPLAYS + "test_a_group_that_cannot_wait_is_trained_without_due_results",
    ),
    Mutation(
        "has a false reward trained before its replay",
        "trainer_node/ledger/ledger.py",
        "# type: ignore[arg-type]\n            replaying.distrust_reopened(conn, now, self._policy, fail_job)\n",
        "# type: ignore[arg-type]\n",
        REPLAYS + "test_results_of_a_taken_batch_end_when_the_batch_is_reopened",
    ),
    Mutation(
        "states false rewards",
        "p2pcast/cli/rollout_commands/ledger_command.py",
        "        if why is not None:\n            raise UsageError(",
        "        if False:\n            raise UsageError(",
        "tests/p2pcast/cli/test_ledger_command.py::test_a_ledger_trusts_no_worker_without_the_option",
    ),
    Mutation(
        "hang or crash, with a child that hangs too, or take all memory",
        CHOICE,
        "            await self.close()\n            raise self._failed",
        "            raise self._failed",
        CHOICES + "test_hooks_that_hang_are_killed_with_their_children",
    ),
    Mutation(
        "hang or crash, with a child that hangs too, or take all memory",
        "p2pcast/tasks/child_processes/hook_child.py",
        "    limit_memory(memory_bytes)\n",
        "    assert memory_bytes\n",
        CHOICES + "test_hooks_that_fail_end_the_feeding",
    ),
    Mutation(
        "answer weights without bound, or values that fill the database",
        CHOICE,
        "if not 0 <= weight <= MAX_WEIGHT:",
        "if False:",
        CHOICES + "test_hooks_that_fail_end_the_feeding",
    ),
    Mutation(
        "answer weights without bound, or values that fill the database",
        "p2pcast/tasks/prompt_hooks.py",
        "if len(texts) > MAX_STATE_VALUES or sum(map(len, texts.values())) > MAX_STATE_BYTES:",
        "if False:",
        CHOICES + "test_hooks_that_fail_end_the_feeding",
    ),
    Mutation(
        "read the ledger's tokens from the environment",
        CHILD,
        "for name, value in os.environ.items() if name not in SECRETS",
        "for name, value in os.environ.items()",
        CHOICES + "test_hooks_see_no_token",
    ),
    Mutation(
        "reads a worker's bearer on its way to the ledger",
        "p2pcast/cli/rollout_commands/work_command.py",
        'if parts.scheme == "http" and not (',
        "if False and not (",
        "tests/p2pcast/cli/test_work_command.py::test_a_bearer_does_not_leave_the_machine_in_plain_text",
    ),
    Mutation(
        "reads the hub's bearer on its way from the ledger",
        "p2pcast/cli/rollout_commands/ledger_command.py",
        'if hub_http[0] != "localhost" and not is_loopback(hub_http[0]):',
        "if False:",
        "tests/p2pcast/cli/test_ledger_command.py::test_the_hubs_bearer_does_not_leave_the_machine_in_plain_text",
    ),
    Mutation(
        "answers in the ledger's place, with its own valid certificate",
        SERVER_ROLE,
        "if found.role != context.role:",
        "if False:",
        SERVERS + "test_a_server_of_another_role_receives_no_byte",
    ),
    Mutation(
        "answers in the ledger's place, with its own valid certificate",
        SERVER_ROLE,
        "sslsocket_class = _CheckedSocket",
        "sslsocket_class = ssl.SSLSocket",
        SERVERS + "test_a_blocking_client_is_checked_too",
    ),
    Mutation(
        "answers in the ledger's place, with its own valid certificate",
        "p2pcast/trust/certificate_authority.py",
        "[ExtendedKeyUsageOID.SERVER_AUTH] if who.role in SERVERS else []",
        "[ExtendedKeyUsageOID.SERVER_AUTH]",
        SERVERS + "test_a_clients_certificate_is_no_servers",
    ),
    Mutation(
        "answers in the ledger's place, with its own valid certificate",
        SERVER_ROLE,
        "if found.run != context.run:",
        "if False:",
        SERVERS + "test_a_ledger_of_another_run_receives_no_byte",
    ),
    Mutation(
        "answers in the ledger's place, so that workers give up",
        "rollout_node/worker/ledger_client.py",
        "if self._answered and isinstance(found, RefusedError) else found",
        "if False else found",
        "tests/rollout_node/worker/test_ledger_over_tls.py::test_a_later_impostor_ends_no_worker",
    ),
    Mutation(
        "keeps workers from the hub",
        NODE,
        "            except P2PCastError as error:\n                self._warn",
        "            except UsageError as error:\n                self._warn",
        NODES + "test_a_hub_that_is_away_ends_no_worker",
    ),
    Mutation(
        "keeps workers from the hub",
        NODE,
        "            except P2PCastError as error:\n                self._warn",
        "            except RetryableError as error:\n                self._warn",
        NODES + "test_a_hub_that_refuses_ends_no_worker_with_a_valid_certificate",
    ),
    Mutation(
        "keeps workers from the hub",
        NODE,
        "        write_pem(path, new_key(), [])",
        "        return new_key()",
        NODES + "test_a_lost_answer_costs_no_identity",
    ),
    Mutation(
        "sends requests to a ledger without a certificate",
        CONTEXTS,
        "ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED",
        "ssl.CERT_OPTIONAL",
        CALLERS + "test_a_client_without_a_certificate_sends_no_request",
    ),
    Mutation(
        "sends requests to a ledger without a certificate",
        CONTEXTS,
        "context.verify_mode = verify",
        "context.verify_mode = verify\n    context.verify_flags |= 0x200000  # X509_V_FLAG_NO_CHECK_TIME",
        CALLERS + "test_an_expired_certificate_sends_no_request",
    ),
    Mutation(
        "sends requests to a ledger without a certificate",
        CONTEXTS,
        "context.verify_mode = verify",
        "context.verify_mode = ssl.CERT_NONE",
        CALLERS + "test_a_certificate_of_another_authority_sends_no_request",
    ),
    Mutation(
        "sends requests to a ledger without a certificate",
        CALLER,
        "if holder.run != run:",
        "if False:",
        CALLERS + "test_a_caller_of_another_run_is_refused",
    ),
    Mutation(
        "keeps a connection to the ledger open",
        CALLER,
        "if holder.node in evicted:",
        "if False:",
        CALLERS + "test_an_eviction_counts_on_open_connections",
    ),
    Mutation(
        "keeps a connection to the ledger open",
        CALLER,
        "if time.time() >= until:",
        "if False:",
        CALLERS + "test_a_certificate_that_expires_on_an_open_connection_ends_the_connection",
    ),
    Mutation(
        "poses as the ledger with a workers' token",
        TOKEN_LEDGER,
        "if role != found.role and not (found.own and local):",
        "if False:",
        NODES + "test_a_token_of_another_role_gives_no_certificate",
    ),
    Mutation(
        "shows a certificate that is not its own",
        "p2pcast/trust/kept_certificate.py",
        "found if found.who == self.who and fingerprint(found.authority) == self._authority else None",
        "found",
        NODES + "test_a_certificate_of_another_run_in_the_folder_is_not_used",
    ),
    Mutation(
        "settles, prolongs or gives back",
        SETTLING,
        ".where(db.leases.c.id.in_(lease_ids), db.leases.c.worker_id == worker_id)",
        ".where(db.leases.c.id.in_(lease_ids))",
        LEDGER_RULES + "test_worker_cannot_settle_another_workers_lease",
    ),
    Mutation(
        "settles, prolongs or gives back",
        LEASING,
        "db.leases.c.id.in_(lease_ids), db.leases.c.worker_id == worker.id, db",
        "db.leases.c.id.in_(lease_ids), db",
        LEDGER_RULES + "test_worker_cannot_settle_another_workers_lease",
    ),
    Mutation(
        "settles, prolongs or gives back",
        LEASING,
        "if (bytes(row.worker_id), bytes(row.id)) in mine]",
        "]",
        LEDGER_RULES + "test_worker_cannot_settle_another_workers_lease",
    ),
    Mutation(
        "names weights that did not make its tokens",
        ACCEPTANCE,
        "if known is not None and known != span.manifest:",
        "if False:",
        GROUNDS,
    ),
    Mutation(
        "names weights that did not make its tokens",
        ACCEPTANCE,
        "if unknown := sorted(v for v in versions if v not in standards.manifests):",
        "if unknown := []:",
        GROUNDS,
    ),
    Mutation(
        "sends log-probabilities that are not finite",
        ACCEPTANCE,
        "if detail := fault(result, standards.vocabulary):",
        'if detail := "":',
        GROUNDS,
    ),
    Mutation(
        "states a reward of its own",
        SETTLING,
        "_Accepted(result, one.job, one.row, float(reward))",
        "_Accepted(result, one.job, one.row, result.reward)",
        LEDGER_RULES + "test_reward_is_the_ledgers_and_not_the_workers",
    ),
    Mutation(
        "states a reward of its own",
        SETTLING,
        "None if math.isfinite(reward) else",
        "None if True else",
        ENDINGS + "test_reward_that_is_not_finite_is_no_reward",
    ),
    Mutation(
        "states another stop or other turns",
        CHECKER,
        "if stop != played.stop:",
        "if False:",
        PLAYS + "test_a_play_with_another_stop_or_other_turns_is_refused",
    ),
    Mutation(
        "states another stop or other turns",
        CHECKER,
        "if turns is not None and not np.array_equal(",
        "if False and not np.array_equal(",
        PLAYS + "test_a_play_with_another_stop_or_other_turns_is_refused",
    ),
    Mutation(
        "states another stop or other turns",
        CHECKER,
        "if stated is not None and not np.array_equal(",
        "if False and not np.array_equal(",
        PLAYS + "test_a_loss_mask_is_the_tasks",
    ),
    Mutation(
        "states another stop or other turns",
        CHECKER,
        "if not ended and (not count or count < most):",
        "if not ended and not count:",
        PLAYS + "test_a_turn_that_was_cut_short_is_refused",
    ),
    Mutation(
        "states another stop or other turns",
        "trainer_node/ledger_server/reward_replays.py",
        "await scorers.check(job, result)",
        "await scorers.reward(job, result.token_ids, result.mask)",
        REQUESTS + "test_other_fields_of_a_result_follow_the_tasks_play",
    ),
    Mutation(
        "hands in a second result of a job",
        SETTLING,
        'settled=row.job_state not in UNSETTLED_JOBS or row.group_state != "open",',
        "settled=False,",
        LEDGER_RULES + "test_first_result_of_a_job_counts_though_late",
    ),
    Mutation(
        "hands in a second result of a job",
        SETTLING,
        "if bytes(before.digest) != result.digest():",
        "if False:",
        LEDGER_RULES + "test_same_result_gets_same_verdict_and_another_is_refused",
    ),
    Mutation(
        "sends forged results again and again",
        LEASING,
        "if (blamed := _blamed(conn, worker)) >= MAX_BLAMED:",
        "if (blamed := 0) >= MAX_BLAMED:",
        ENDINGS + "test_blamed_worker_gets_no_more_leases",
    ),
    Mutation(
        "sends forged results again and again",
        LEASING,
        "if worker.caller == BEARER:",
        "if True:",
        ENDINGS + "test_another_name_of_a_blamed_certificate_is_no_fresh_start",
    ),
    Mutation(
        "keeps its leases without playing",
        LEASING,
        "if sampled[lease_id] > row.tokens",
        "if True",
        LEDGER_RULES + "test_heartbeat_renews_only_a_lease_whose_tokens_grow",
    ),
    Mutation(
        "keeps its leases without playing",
        LEASING,
        "min(now.now_s + row.lasts_s, row.latest_s)",
        "now.now_s + row.lasts_s",
        SHARES + "test_heartbeats_prolong_no_lease_beyond_its_longest_time",
    ),
    Mutation(
        "hands in results whose checks take long",
        DESK,
        "caller = min(waiting, key=lambda one: (one.running, one.since))",
        "caller = waiting[0]",
        DESKS + "test_a_caller_with_many_checks_delays_another_by_one",
    ),
    Mutation(
        "hands in results whose checks take long",
        DESK,
        "fits = caller.running < self._most and (self._free > 1 or not caller.running)",
        "fits = caller.running < self._most",
        DESKS + "test_the_last_free_place_is_for_a_caller_without_one",
    ),
    Mutation(
        "hands in results whose checks take long",
        DESK,
        "first = key not in self._shared",
        "first = True",
        DESKS + "test_a_result_that_is_sent_again_is_checked_once",
    ),
    Mutation(
        "sends one result again and again, so that its others are not audited",
        "trainer_node/ledger/ledger.py",
        "        for one in verdicts.new:\n            versions",
        "        for one in verdicts.given:\n            versions",
        "tests/trainer_node/ledger/test_auditing.py::test_a_result_that_is_sent_again_is_no_likelier_to_be_audited",
    ),
    Mutation(
        "names old versions, so that groups",
        ACCEPTANCE,
        "if span.version.branch == served.branch and span.version.step < served.step:",
        "if False:",
        LIES + "test_old_version_of_the_leases_own_branch_is_forged",
    ),
    Mutation(
        "fails a job again and again",
        SETTLING,
        "return callers_seen(conn, now, bytes(row.task_hash)) <= callers",
        "return True",
        LIES + "test_one_caller_rejects_no_job",
    ),
    Mutation(
        "fails a job again and again",
        LEASING,
        "if not any(row.failed_by == me and row.failed_s > since_s for row in rows):",
        "if True:",
        LIES + "test_failed_job_goes_to_another_caller_first",
    ),
    Mutation(
        "invents versions, for which no result",
        SETTLING,
        "if wrong.reason.blames or (unknown and _invents_versions(conn, row)):",
        "if wrong.reason.blames:",
        LIES + "test_invented_versions_are_blamed_after_a_few",
    ),
    Mutation(
        "keeps a job of every group",
        "trainer_node/ledger/ledger.py",
        "leasing.release_overdue(conn, now, self._rates)",
        "pass",
        LIES + "test_jobs_that_a_worker_keeps_are_played_by_others_while_the_learner_waits",
    ),
    Mutation(
        "keeps a job of every group",
        RATES,
        "slowest = max(slowest, SLOWEST * rates[(len(rates) - 1) // 2])",
        "pass",
        LIES + "test_slowest_rate_counts_down_to_a_tenth_of_the_median_of_all_callers",
    ),
    Mutation(
        "claims a fabricated throughput",
        RATES,
        "return self._missing.get(worker, 0)",
        "return 4096",
        LIES + "test_fabricated_throughput_keeps_no_jobs_from_others",
    ),
    Mutation(
        "claims a fabricated throughput",
        ESTIMATES,
        "return min(rate, MOST_MEDIANS * others) if others > 0 else rate",
        "return rate",
        SPLITS + "test_estimate_counts_up_to_some_medians_of_the_others",
    ),
    Mutation(
        "claims a fabricated throughput",
        ESTIMATES,
        "if one.busy_s < LEAST_WINDOW_S:",
        "if one.busy_s <= 0:",
        SPLITS + "test_window_of_an_instant_goes_on",
    ),
    Mutation(
        "fills the ledger's writer with requests",
        "trainer_node/ledger_server/ledger_routes.py",
        "        async with self._turn():\n            return await asyncio",
        "        if True:\n            return await asyncio",
        "tests/trainer_node/ledger_server/test_caller_transitions.py"
        "::test_transitions_of_one_certificate_leave_room_for_others",
    ),
    Mutation(
        "takes the place of another worker of its name",
        "trainer_node/ledger/ledger.py",
        "if lost is None or lost not in self._displaced:",
        "if True:",
        "tests/trainer_node/ledger/test_worker_names.py::test_two_workers_of_one_name_do_not_displace_each_other_for_ever",
    ),
    Mutation(
        "asks for all jobs before others do",
        LEASING,
        "wanted = within_share(conn, now, policy, rates, worker, wanted)",
        "pass",
        SHARES + "test_share_bounds_a_worker_while_another_asks",
    ),
    Mutation(
        "registers under many names",
        "trainer_node/ledger/ledger.py",
        "if caller != BEARER and int(conn.scalar(own) or 0) >= MAX_NAMES:",
        "if False:",
        LEDGER_RULES + "test_certificate_has_a_bounded_number_of_workers",
    ),
    Mutation(
        "invents device classes without end",
        "trainer_node/ledger/worker_rates.py",
        "if len(self._classes) > MAX_CLASSES:",
        "if False:",
        SHARES + "test_stated_device_classes_take_bounded_memory",
    ),
    Mutation(
        "sends more than the ledger's memory holds",
        BUDGET,
        "if size > BODY_BYTES:",
        "if False:",
        REQUESTS + "test_a_body_above_its_limit_is_refused_unread",
    ),
    Mutation(
        "sends more than the ledger's memory holds",
        "trainer_node/ledger_server/ledger_routes.py",
        "sum(kind.unpacked_bytes(row) for row in rows)",
        "0",
        REQUESTS + "test_small_results_that_unpack_to_more_than_a_request_are_refused_unread",
    ),
    Mutation(
        "sends more than the ledger's memory holds",
        BUDGET,
        "size <= self._free and self._held[caller] + size <= self._caller_bytes",
        "size <= self._free",
        BUDGETS + "test_a_caller_fills_its_own_share_alone",
    ),
    Mutation(
        "opens connections until no other worker",
        "trainer_node/ledger_server/caller_connections.py",
        "if len(mine) >= self._most:",
        "if False:",
        "tests/trainer_node/ledger_server/test_caller_connections.py::test_further_connections_are_refused_until_one_is_closed",
    ),
    Mutation(
        "takes batches, adds groups",
        "trainer_node/ledger_server/callers.py",
        "if caller is None or caller.role != role:",
        "if caller is None:",
        REQUESTS + "test_a_role_sends_its_own_requests_alone",
    ),
    Mutation(
        "takes batches, adds groups",
        "trainer_node/ledger_server/ledger_routes.py",
        'return self._answering(read, "trainer")',
        "return read",
        REQUESTS + "test_a_worker_reads_neither_groups_nor_other_workers",
    ),
    Mutation(
        "samples with other weights than it names",
        "rollout_node/worker/auditor.py",
        "agrees = gaps.mean <= self._tolerance and gaps.largest <= LARGEST",
        "agrees = True",
        "tests/daemons/rollouts/test_audits.py::test_results_of_other_weights_disagree",
    ),
    Mutation(
        "reads other workers' results as an auditor",
        "trainer_node/ledger_server/callers.py",
        "if caller is None or caller.role != role:",
        "if caller is None:",
        "tests/daemons/rollouts/test_audits.py::test_a_worker_reads_no_results_by_auditing",
    ),
    Mutation(
        "takes or applies batches",
        "trainer_node/ledger/ledger_rows.py",
        "if epoch != now.epoch:",
        "if False:",
        LEDGER_RULES + "test_replaced_learner_is_refused",
    ),
    Mutation(
        "changes its weights during a request",
        "rollout_node/worker/completions_sampler.py",
        "            if await self._lasted(before):",
        "            if True:",
        COMPLETIONS + "test_a_sample_whose_weights_changed_is_taken_again",
    ),
    Mutation(
        "changes its weights during a request",
        "rollout_node/worker/completions_sampler.py",
        "        except RetryableError:\n            return False",
        "        except RetryableError:\n            return True",
        COMPLETIONS + "test_an_answer_that_ends_under_a_write_is_taken_again",
    ),
    Mutation(
        "states a newer version than its engine serves",
        "trainer_node/scheduling/served_versions.py",
        "return Believed(_older(served, known.served),",
        "return Believed(served,",
        ENGINES + "test_an_engine_gets_no_credit_for_a_version_beyond_its_own",
    ),
    Mutation(
        "states a newer version than its engine serves",
        LEASING,
        'if wanted and (engine.agreed or policy.rule == "bounded") and plays_training(',
        "if wanted and plays_training(",
        ENGINES + "test_a_job_for_one_version_needs_agreement",
    ),
    Mutation(
        "states a newer version than its engine serves",
        LEASING,
        "if served not in now.manifests:",
        "if engine.served not in now.manifests:",
        ENGINES + "test_an_unpublished_version_is_not_believed",
    ),
]
