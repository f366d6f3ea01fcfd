"""Defences that keep a version one thing for ever."""

from __future__ import annotations

from mutation import Mutation

DAEMONS = "tests/daemons/swarm/test_one_version.py::"
NUMBERS = "tests/trainer_node/publish/test_version_numbers.py::"
RECALL = "tests/trainer_node/test_restart_recovery.py::"

ONE_VERSION = [
    Mutation(
        "the hub dies after peers have a version and before its own disk has it",
        "p2pcast/artifact/assembly.py",
        "manifest.version_hash != OWN or self.durable_signed is not None",
        "True",
        DAEMONS + "test_no_engine_commits_before_the_hub_holds_the_version_on_its_disk",
    ),
    Mutation(
        "the hub dies after peers have a version and before its own disk has it",
        "trainer_node/publish/delta_publisher.py",
        "        await self._staging.run(self._numbers.note, version)\n",
        "",
        DAEMONS + "test_a_hub_that_ends_with_a_full_disk_at_the_tail_uses_no_number_twice",
    ),
    Mutation(
        "the hub dies after peers have a version and before its own disk has it",
        "rollout_node/sync/catalog_updater.py",
        "not holding.irrevocable",
        "holding.incomplete",
        DAEMONS + "test_a_hub_that_dies_between_seal_and_disk_goes_on_with_another_number_and_other_bytes",
    ),
    Mutation(
        "the machine goes down and loses unsynced records",
        "trainer_node/publish/version_numbers.py",
        '            if reserved[1] == boot != "" and not self._log.damaged:',
        "            if True:",
        NUMBERS + "test_after_another_boot_reserved_numbers_count_as_used",
    ),
    Mutation(
        "the hub's state is restored from an older copy",
        "trainer_node/restart_recovery.py",
        "        self._numbers.above(version.branch)\n",
        "",
        RECALL + "test_a_proved_version_that_the_hub_lacks_opens_a_higher_branch",
    ),
    Mutation(
        "the hub's state is restored from an older copy",
        "rollout_node/control/reporter.py",
        "reverse=True) if first else []",
        "reverse=True) if False else []",
        DAEMONS + "test_a_hub_restored_from_an_older_copy_learns_from_its_peers",
    ),
    Mutation(
        "a peer holds another state of a version than the run",
        "rollout_node/stage/identity_check.py",
        "        return staged is not None and own is not None and self._identities.get(staged, own) != own",
        "        return False",
        DAEMONS + "test_a_connected_peer_with_another_state_discards_that_state",
    ),
    Mutation(
        "the hub's disk has lost a version, and a peer offers another state",
        "trainer_node/background/lost_artifacts.py",
        'if known not in (None, f"{manifest.layout.hex()} {manifest.state:016x}"):',
        "if False:",
        "tests/daemons/swarm/test_gaps.py::test_a_peers_other_state_under_a_lost_version_is_not_taken",
    ),
    Mutation(
        "making the hub open branches",
        "trainer_node/restart_recovery.py",
        "            found.append(kind.from_signed(signed, key))",
        "            found.append(kind.from_signed(signed, bytes(len(key))))",
        RECALL + "test_a_proved_version_that_the_hub_lacks_opens_a_higher_branch",
    ),
]
