"""Defences that keep an engine from computing something else than a fresh engine on the version's folder."""

from __future__ import annotations

from mutation import Mutation

ACCOUNTS = "tests/rollout_node/in_engine/test_tensor_accounts.py::"
INSTALLER = "tests/rollout_node/installers/test_engine_installer.py::"
INSTALLATION = "rollout_node/in_engine/installation.py"
TIED = "two tensors of a version differ, and the engine has one parameter for both"
SETTINGS_TESTS = "tests/rollout_node/in_engine/test_started_settings.py::"
SETTINGS = "a version's `config.json` makes another model"
UNREAD = "the engine reads nothing from a tensor of the run"
UNPROVED = "some weights of an engine cannot be compared"

ENGINE_WEIGHTS = [
    Mutation(
        TIED,
        INSTALLATION,
        "                self._check_twins(found.shadow, version)\n",
        "",
        ACCOUNTS + "test_a_tied_engine_that_is_loaded_whole_takes_equal_tensors_alone",
    ),
    Mutation(
        TIED,
        INSTALLATION,
        "if changed & {n for pair in self.mapping.twins.items() for n in pair}:",
        "if False:",
        ACCOUNTS + "test_a_tied_engine_takes_equal_tensors_alone",
    ),
    Mutation(
        TIED,
        "rollout_node/in_engine/loader_recording.py",
        "    unreached += filled_twice(found.blocks, found.storages)\n",
        "",
        ACCOUNTS + "test_tensors_that_overlap_in_part_are_refused",
    ),
    Mutation(
        TIED,
        "rollout_node/installers/install_machine.py",
        'if (common_version(reports) or common_version(reports, "before")) != self.state.committed:',
        "if common_version(reports) != self.state.committed:",
        INSTALLER + "test_an_engine_keeps_its_version_while_a_run_with_other_tensors_is_refused",
    ),
    Mutation(
        UNREAD,
        "rollout_node/installers/install_machine.py",
        "        if unknown:\n            raise LocalError(\n",
        "        if False:\n            raise LocalError(\n",
        INSTALLER + "test_a_tensor_that_no_rank_reads_refuses_the_run_by_name",
    ),
    Mutation(
        UNREAD,
        "rollout_node/in_engine/tensor_accounts.py",
        "    return part is not None and part[1] not in parts",
        "    return True",
        ACCOUNTS + "test_rules_name_the_tensors_that_change_no_answer",
    ),
    Mutation(
        SETTINGS,
        INSTALLATION,
        "if self._started is not None and files.config",
        "if False and files.config",
        SETTINGS_TESTS + "test_a_version_with_other_settings_is_refused",
    ),
    Mutation(
        SETTINGS,
        "rollout_node/in_engine/started_settings.py",
        "self._kind.from_dict(copy.deepcopy(document)).to_dict()",
        "document",
        SETTINGS_TESTS + "test_a_default_may_be_left_out",
    ),
    Mutation(
        UNPROVED,
        "p2pcast/cli/verify_live.py",
        '    if unknown := [f"{r[',
        '    if unknown := [] and [f"{r[',
        "tests/daemons/engines/test_engine_life.py::test_verify_looks_at_the_engines_own_weights",
    ),
]
