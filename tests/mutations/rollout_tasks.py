"""Tasks, checks of rewards, and hooks."""

from __future__ import annotations

from mutation import Mutation

PLAY = "p2pcast/tasks/play.py"
PROCESS = "p2pcast/tasks/task_process.py"
CHILD = "p2pcast/tasks/child_processes/killable_child.py"
USER_CODE = "p2pcast/daemon/user_code.py"
CHECKER = "p2pcast/tasks/task_checker.py"
PLAYS = "tests/p2pcast/tasks/test_play.py::"
CHECKS = "tests/p2pcast/tasks/test_task_process.py::"
POOL = "p2pcast/tasks/child_processes/play_pool.py"
CHILDREN = "tests/p2pcast/tasks/child_processes/test_killable_child.py::"
POOLS = "tests/p2pcast/tasks/child_processes/test_play_pool.py::"
CHOICE = "trainer_node/ledger_server/prompt_choice.py"
CHOICES = "tests/trainer_node/ledger_server/test_prompt_choice.py::"

ROLLOUT_TASKS = [
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
        "hangs, with a child that hangs too",
        PROCESS,
        "return [*found, checker.failed(died)]",
        "return [checker.failed(died)] * most",
        CHECKS + "test_a_check_that_ends_its_process_costs_no_check_of_the_same_request",
    ),
    Mutation(
        "blocks, crashes or takes all memory",
        POOL,
        "if outcome.why and alone:",
        "if outcome.why:",
        POOLS + "test_a_hostile_play_costs_itself_alone",
    ),
    Mutation(
        "blocks, crashes or takes all memory",
        POOL,
        "if outcome.why and alone:",
        "if outcome.why:",
        POOLS + "test_a_cancelled_play_ends_at_once_and_harms_no_later_play",
    ),
    Mutation(
        "blocks, crashes or takes all memory",
        POOL,
        "if len(said) < self._again[key]:",
        "if True:",
        POOLS + "test_a_hostile_play_costs_itself_alone",
    ),
    Mutation(
        "blocks, crashes or takes all memory",
        POOL,
        "while looks < LOOKS:",
        "while True:",
        POOLS + "test_further_plays_of_a_prompt_that_blocked_disturb_no_other",
    ),
    Mutation(
        "blocks, crashes or takes all memory",
        POOL,
        "PlayBlockedError if why == BLOCKED else PlayFailedError",
        "PlayFailedError",
        POOLS + "test_further_plays_of_a_prompt_that_blocked_disturb_no_other",
    ),
    Mutation(
        "blocks, crashes or takes all memory",
        POOL,
        "run, alone = _Run(sampler, job), job.prompt in self._doubted",
        "run, alone = _Run(sampler, job), False",
        POOLS + "test_further_plays_of_a_prompt_that_blocked_disturb_no_other",
    ),
    Mutation(
        "blocks, crashes or takes all memory",
        POOL,
        "self._clear_for(self._slot[0])",
        "pass",
        POOLS + "test_plays_leave_a_step_that_takes_long",
    ),
    Mutation(
        "the start or the kill of a task's process is cancelled",
        CHILD,
        "        except BaseException:\n            for end in ends:",
        "        except OSError:\n            for end in ends:",
        CHILDREN + "test_a_start_that_is_cancelled_leaves_neither_pipe_nor_process",
    ),
    Mutation(
        "the start or the kill of a task's process is cancelled",
        CHILD,
        "        except BaseException:  # a pipe",
        "        except OSError:  # a pipe",
        CHILDREN + "test_a_start_that_is_cancelled_leaves_neither_pipe_nor_process",
    ),
    Mutation(
        "the start or the kill of a task's process is cancelled",
        CHILD,
        "        try:\n            await self._process.wait()\n        finally:\n            self._output.close()",
        "        await self._process.wait()\n        self._output.close()",
        CHILDREN + "test_a_detached_process_holds_no_pipe_of_a_cancelled_kill",
    ),
    Mutation(
        "blocks, crashes or takes all memory",
        "p2pcast/tasks/child_processes/child_channel.py",
        "os.register_at_fork(after_in_child=self._close)",
        "self.closed = False",
        POOLS + "test_a_play_that_forks_goes_on_and_its_copy_does_not",
    ),
    Mutation(
        "states tokens, log-probabilities or versions that the engine did not give",
        "p2pcast/tasks/child_processes/said_turns.py",
        "if list(one.token_ids) == said",
        "if True",
        POOLS + "test_a_hostile_play_costs_itself_alone",
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
        "answers `math` with work without end",
        "p2pcast/tasks/child_processes/child_channel.py",
        "    latest = math.ceil(time.process_time() + seconds) + 1",
        "    latest = hard",
        CHECKS + "test_a_check_has_its_processor_time",
    ),
    Mutation(
        "answers without end where its other answers are all right",
        "trainer_node/ledger/batch_cut.py",
        "return paid([reward for reward, _ in rows], [cut for _, cut in rows], overlong)",
        "return [reward for reward, _ in rows]",
        "tests/trainer_node/ledger/test_cut_off_results.py::test_a_batch_has_the_groups_whose_paid_rewards_differ",
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
        USER_CODE,
        "_INHERITED.fullmatch(name) and",
        "name and",
        CHECKS + "test_a_check_sees_no_token",
    ),
    Mutation(
        "reads the node's tokens",
        CHILD,
        "env=child_environment()",
        "env=dict(os.environ)",
        POOLS + "test_a_play_sees_no_secret",
    ),
    Mutation(
        "a task's check hangs",
        CHOICE,
        "            await self.close()\n            raise self._failed",
        "            raise self._failed",
        CHOICES + "test_hooks_that_hang_are_killed_with_their_children",
    ),
    Mutation(
        "a task's check hangs",
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
        "plants modules where a daemon starts",
        USER_CODE,
        '| {"PYTHONSAFEPATH": "1"}',
        "",
        CHECKS + "test_a_check_runs_no_module_of_the_current_folder",
    ),
    Mutation(
        "plants modules where a daemon starts",
        USER_CODE,
        "                check_shared(place)",
        "                pass",
        CHECKS + "test_a_users_module_that_others_could_change_is_refused",
    ),
    Mutation(
        "a play, a check or a hook reads the node's tokens from the environment",
        USER_CODE,
        "_INHERITED.fullmatch(name) and",
        "name and",
        CHOICES + "test_hooks_see_no_token",
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
]
