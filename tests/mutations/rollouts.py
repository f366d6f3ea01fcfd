"""Defences against workers and against tasks: docs/design/security.md, Rollouts."""

from __future__ import annotations

from mutation import Mutation

SETTLING = "trainer_node/ledger/result_transitions.py"
LEASING = "trainer_node/ledger/leasing.py"
FAILING = "trainer_node/ledger/failures/failed_jobs.py"
FAILED_JOBS = "tests/trainer_node/ledger/failures/test_failed_jobs.py::"
LEDGER_RULES = "tests/trainer_node/ledger/test_ledger_rules.py::"
ENDINGS = "tests/trainer_node/ledger/test_ledger_endings.py::"
SHARES = "tests/trainer_node/ledger/test_share_ceiling.py::"
LIES = "tests/trainer_node/ledger/test_lying_worker.py::"
ENGINES = "tests/trainer_node/ledger/test_known_engines.py::"
RATES = "trainer_node/ledger/worker_rates.py"
ESTIMATES = "trainer_node/scheduling/shares.py"
SPLITS = "tests/trainer_node/scheduling/test_shares.py::"
ACCEPTANCE = "trainer_node/ledger/acceptance.py"
EXPERTS = "tests/trainer_node/ledger/test_acceptance.py::"
CLAIMS = "tests/trainer_node/ledger/test_claimed_schedules.py::"
TURNS = "trainer_node/learning/objective/judged_tokens.py"
JUDGED = "tests/trainer_node/learning/test_judged_turns.py::"
GROUNDS = "tests/trainer_node/ledger/test_acceptance.py::test_grounds_of_rejection"
BUDGET = "trainer_node/ledger_server/body_budget.py"
BUDGETS = "tests/trainer_node/ledger_server/test_body_budget.py::"
REQUESTS = "tests/daemons/rollouts/test_ledger_requests.py::"
REPLAYING = "trainer_node/ledger/audits/replaying.py"
REPLAYS = "tests/trainer_node/ledger/audits/test_replaying.py::"
DESK = "trainer_node/ledger_server/rewards/reward_desk.py"
DESKS = "tests/trainer_node/ledger_server/rewards/test_reward_desk.py::"
COMPLETIONS = "tests/rollout_node/worker/test_completions_sampler.py::"

ROLLOUTS = [
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
        "trainer_node/ledger/batch_transitions.py",
        "if row.replay == DUE:",
        "if False:",
        REPLAYS + "test_rewards_of_a_new_worker_are_replayed_before_training",
    ),
    Mutation(
        "has a false reward trained before its replay",
        "trainer_node/ledger/batch_transitions.py",
        "            leave_out(conn, live[candidate.opened])\n",
        "",
        REPLAYS + "test_a_group_that_cannot_wait_is_trained_without_due_results",
    ),
    Mutation(
        "has a false reward trained before its replay",
        "trainer_node/ledger/ledger.py",
        "            )\n            replaying.distrust_reopened(conn, now, self._policy, fail_job)\n",
        "            )\n",
        REPLAYS + "test_results_of_a_taken_batch_end_when_the_batch_is_reopened",
    ),
    Mutation(
        "states false rewards",
        "trainer_node/commands/ledger_command.py",
        "        if why is not None:\n            raise UsageError(",
        "        if False:\n            raise UsageError(",
        "tests/trainer_node/commands/test_ledger_command.py::test_a_ledger_trusts_no_worker_without_the_option",
    ),
    Mutation(
        "reads the hub's bearer on its way from the ledger",
        "trainer_node/commands/ledger_command.py",
        'if hub_http[0] != "localhost" and not is_loopback(hub_http[0]):',
        "if False:",
        "tests/trainer_node/commands/test_ledger_command.py::test_the_hubs_bearer_does_not_leave_the_machine_in_plain_text",
    ),
    Mutation(
        "settles, prolongs or gives back",
        SETTLING,
        '.where(db.leases.c.worker_id == bindparam("worker"))',
        "",
        LEDGER_RULES + "test_worker_cannot_settle_another_workers_lease",
    ),
    Mutation(
        "settles, prolongs or gives back",
        LEASING,
        '.where(db.leases.c.id.in_(bindparam("leases", expanding=True)), db.leases.c.worker_id == bindparam("worker"))',
        '.where(db.leases.c.id.in_(bindparam("leases", expanding=True)))',
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
        "claims sparse attention",
        ACCEPTANCE,
        "and standards.schedules.get(version) != name:",
        "and False:",
        CLAIMS + "test_a_worker_that_claims_the_schedule_of_no_version_gets_no_more_leases",
    ),
    Mutation(
        "claims sparse attention",
        ACCEPTANCE,
        "and standards.schedules.get(version) != name:",
        "and version not in standards.schedules:",
        EXPERTS + "test_sparse_attention_is_claimed_by_the_versions_own_schedule_alone",
    ),
    Mutation(
        "claims sparse attention",
        ACCEPTANCE,
        "and standards.schedules.get(version) != name:",
        "and False:",
        "tests/daemons/rollouts/test_audits.py::test_a_claimed_schedule_hides_no_result_from_audits",
    ),
    Mutation(
        "names weights that did not make its tokens",
        ACCEPTANCE,
        "if unknown := sorted(v for v in versions if v not in standards.manifests):",
        "if unknown := []:",
        GROUNDS,
    ),
    Mutation(
        "sends `top_logprobs` with each result",
        TURNS,
        "sorted(queue)[:MOST_JUDGED]:",
        "sorted(queue):",
        JUDGED + "test_judged_rollouts_of_a_batch_are_bounded",
    ),
    Mutation(
        "sends `top_logprobs` with each result",
        TURNS,
        "turns[worker] += 1",
        "pass",
        JUDGED + "test_one_worker_takes_no_turn_of_another",
    ),
    Mutation(
        "sends log-probabilities that are not finite",
        ACCEPTANCE,
        "if (detail := fault(result, standards.vocabulary)) and (result.spans or not result.sampled):",
        'if detail := "":',
        GROUNDS,
    ),
    Mutation(
        "sends experts that are repeated, or that the model lacks",
        ACCEPTANCE,
        "if routed is not None and shape is not None and (detail := shape_fault(routed, shape)):",
        'if detail := "":',
        EXPERTS + "test_experts_of_another_model_are_malformed",
    ),
    Mutation(
        "sends experts that are repeated, or that the model lacks",
        "p2pcast/rollouts/routed_experts.py",
        "if not (chosen | none).all():",
        "if False:",
        EXPERTS + "test_repeated_experts_are_malformed_for_every_model",
    ),
    Mutation(
        "sends experts that are repeated, or that the model lacks",
        "trainer_node/learning/objective/training_rows.py",
        "if found is None or shape_fault(found, experts, expert_layers) is not None:",
        "if found is None:",
        "tests/trainer_node/learning/test_router_replay.py::test_rows_have_experts_that_fit_the_model_if_replay_is_on",
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
        "None if wrong is None else",
        "None if True else",
        ENDINGS + "test_reward_that_is_not_finite_is_no_reward",
    ),
    Mutation(
        "states another stop or other turns",
        "p2pcast/tasks/task_process.py",
        "_one(job, result.token_ids, result.mask, _claims(result))",
        "_one(job, result.token_ids, result.mask, None)",
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
        "if bytes(row.digest) != result.digest():",
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
        "waits for jobs of another task, or for an engine that serves another version",
        "trainer_node/ledger/leasing.py",
        "offered = engine.agreed and worker.task_hash == policy.task_hash",
        "offered = engine.agreed",
        "tests/trainer_node/ledger/test_grants.py::test_a_worker_of_another_task_says_nothing_of_others",
    ),
    Mutation(
        "waits for jobs of another task, or for an engine that serves another version",
        "trainer_node/ledger/leasing.py",
        "offered = engine.agreed and worker.task_hash == policy.task_hash",
        "offered = worker.task_hash == policy.task_hash",
        "tests/trainer_node/ledger/test_grants.py::test_an_engine_that_the_hub_knows_otherwise_says_nothing_of_others",
    ),
    Mutation(
        "hands in results whose checks take long",
        DESK,
        "self.used += count << int(self.doublings)",
        "self.used += 1",
        DESKS + "test_callers_get_shares_by_time_and_not_by_turns",
    ),
    Mutation(
        "hands in results whose checks take long",
        DESK,
        "count << int(self.doublings)",
        "count",
        DESKS + "test_ten_callers_whose_checks_hang_leave_an_honest_one_half_of_the_time",
    ),
    Mutation(
        "hands in results whose checks take long",
        DESK,
        "caller = min(waiting, key=lambda one: (one.running, one.used, one.since))",
        "caller = waiting[0]",
        DESKS + "test_a_caller_with_many_requests_delays_another_by_one",
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
        "p2pcast/tasks/task_checker.py",
        "if number and time.monotonic() > until_s:",
        "if False:",
        "tests/p2pcast/tasks/test_task_process.py::test_a_request_ends_after_its_time_and_not_before_its_first_check",
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
        "tests/trainer_node/ledger/audits/test_auditing.py::test_a_result_that_is_sent_again_is_no_likelier_to_be_audited",
    ),
    Mutation(
        "names old versions, so that groups",
        ACCEPTANCE,
        "if served is not None and version.branch == served.branch and version.step < served.step:",
        "if False:",
        LIES + "test_old_version_of_the_leases_own_branch_counts_for_nothing",
    ),
    Mutation(
        "names old versions, so that groups",
        "trainer_node/ledger/failures/failed_jobs.py",
        'if row.purpose == "train" and not admissible(now, policy, Version(row.branch, row.served)):',
        'if row.purpose == "train":',
        LIES + "test_old_version_of_the_leases_own_branch_counts_for_nothing",
    ),
    Mutation(
        "fails a job again and again",
        FAILING,
        "return callers_seen(conn, now, bytes(row.task_hash)) <= callers",
        "return True",
        LIES + "test_one_caller_rejects_no_job",
    ),
    Mutation(
        "fails a job again and again",
        FAILING,
        "return callers_seen(conn, now, bytes(row.task_hash)) <= callers",
        "return True",
        FAILED_JOBS + "test_one_worker_that_lies_rejects_no_job_while_another_is_there",
    ),
    Mutation(
        "fails a job again and again",
        FAILING,
        "return len(set(callers)) >= LEAST_RETURNERS or callers_seen",
        "return True or callers_seen",
        FAILED_JOBS + "test_returns_of_one_worker_end_no_group_while_another_is_there",
    ),
    Mutation(
        "three returns for the fault of a prompt",
        FAILING,
        "(ends_group and _is_prompt_given_up(conn, now, row)) or (",
        "False or (",
        FAILED_JOBS + "test_three_returns_of_two_workers_for_any_jobs_of_a_group_end_the_group",
    ),
    Mutation(
        "three returns for the fault of a prompt",
        FAILING,
        "return len(set(callers)) >= LEAST_RETURNERS or callers_seen",
        "return callers_seen",
        FAILED_JOBS + "test_three_returns_of_two_workers_for_any_jobs_of_a_group_end_the_group",
    ),
    Mutation(
        "fails a job again and again",
        FAILING,
        "lease_id=row.id, caller=caller_of(row))",
        "lease_id=row.id, caller=bytes(row.worker_id).hex())",
        FAILED_JOBS + "test_names_of_one_certificate_count_as_one_worker",
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
        "leasing.release_overdue(conn, now, overdue_s)",
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
        "trainer_node/ledger/database/shared_transactions.py",
        "queues = (self._ordinary, self._urgent) if urgent else (self._urgent, self._ordinary)",
        "queues = (self._urgent, self._ordinary)",
        "tests/trainer_node/ledger/database/test_shared_transactions.py::test_endless_urgent_calls_leave_turns_to_ordinary_calls",
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
        "trainer_node/ledger/workers/registration.py",
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
        "trainer_node/ledger/workers/registration.py",
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
        "trainer_node/ledger_server/api_server.py",
        "sum(_each(kind.unpacked_bytes, rows, field))",
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
        "takes batches, adds groups",
        "trainer_node/ledger_server/api_server.py",
        'return web.get(f"/v1/{name}", self.answering(read, "trainer"))',
        'return web.get(f"/v1/{name}", read)',
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
