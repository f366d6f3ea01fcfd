"""The rules of ``p2pcast doctor`` on a machine: tables of cases, and what holds for all facts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.doctor.machine_facts import OUTCOMES, ROLES, DiskSpeed, MachineFacts, Port, StateFolder, Volume
from p2pcast.doctor.machine_verdicts import could_run, judge

GB = 10**9
MOST_WORDS = 30
FIT = MachineFacts(
    python=(3, 12, 1),
    system="linux",
    user=1000,
    packages={"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.1", "optimi": "0.3", "psycopg": "3.2"},
    gpus=("GPU 0: NVIDIA H100",),
    cores=16,
    memory_bytes=128 * GB,
    memory_available_bytes=100 * GB,
    container_limit_bytes=None,
    shm=Volume("/dev/shm", "tmpfs", 64 * GB, 60 * GB, 0o1777, True),
    state=StateFolder("/srv/run", True, False, 1000, 0o700, True, 0),
    disk=Volume("/srv/run", "ext4", 2000 * GB, 1000 * GB, 0o700, True),
    speed=DiskSpeed(1e9, 1e-3),
    descriptors=1 << 20,
    clock_synchronized=True,
    ports=(Port(("hub",), "--listen", ":7077", 7077),),
    ipv6=True,
    congestion_available=("bbr", "cubic", "reno"),
    bbr_usable=True,
    congestion_default="cubic",
    window_bytes=3e6,
)


def outcomes(facts, size_bytes=16 * GB, roles=ROLES):
    """(check, outcome) → roles, of findings other than ok."""
    found = {}
    for each in judge(facts, roles, size_bytes):
        if each.outcome != "ok":
            found.setdefault((each.check, each.outcome), []).extend(each.roles)
    return found


def test_a_fit_machine_has_no_faults():
    assert outcomes(FIT) == {}
    assert {role for each in judge(FIT, ROLES, 16 * GB) for role in each.roles} == set(ROLES)


@pytest.mark.parametrize(
    ("changed", "check", "outcome", "remedy"),
    [
        ({"python": (3, 10, 4)}, "python", "unfit", "uv venv --python 3.11"),
        ({"system": "darwin"}, "system", "warn", "docker run"),
        ({"packages": {}}, "engine", "unfit", "p2pcast[vllm]"),
        ({"packages": {"vllm": "0.40.1"}}, "engine", "warn", "vllm==0.32"),
        ({"packages": {"sglang": ""}}, "engine", "unknown", "pip show sglang"),
        ({"packages": {"torch": "2.13.0"}}, "trainer", "unfit", "p2pcast[trainer]"),
        ({"gpus": ()}, "gpu", "warn", "nvidia-smi"),
        ({"cores": 1}, "cores", "warn", "nproc"),
        ({"shm": replace(FIT.shm, writable=False)}, "tmpfs", "unfit", "chmod 1777 /dev/shm"),
        ({"shm": replace(FIT.shm, mode=0o777)}, "tmpfs", "unfit", "chmod 1777 /dev/shm"),
        ({"shm": replace(FIT.shm, kind="ext4")}, "tmpfs", "warn", "mount -t tmpfs"),
        ({"shm": replace(FIT.shm, free_bytes=15 * GB)}, "tmpfs room", "unfit", "remount,size=68G"),
        ({"shm": replace(FIT.shm, free_bytes=20 * GB)}, "tmpfs room", "warn", "--shm-size"),
        ({"memory_bytes": 8 * GB}, "memory", "unfit", "ps "),
        ({"container_limit_bytes": 8 * GB}, "memory", "unfit", "docker run --memory"),
        ({"memory_available_bytes": 20 * GB}, "memory", "warn", "ps "),
        ({"state": replace(FIT.state, is_link=True)}, "state folder", "unfit", "readlink"),
        ({"state": replace(FIT.state, is_folder=False)}, "state folder", "unfit", "ls -l"),
        ({"state": replace(FIT.state, parents_safe=False)}, "state folder", "unfit", "namei"),
        ({"state": replace(FIT.state, owner=0)}, "state folder", "unfit", "chown"),
        ({"state": replace(FIT.state, mode=0o777)}, "state folder", "unfit", "chmod 700"),
        ({"state": replace(FIT.state, foreign=3)}, "state folder", "unfit", "find"),
        ({"state": replace(FIT.state, foreign=None)}, "state folder", "unknown", "namei"),
        ({"disk": replace(FIT.disk, free_bytes=100 * GB)}, "disk room", "warn", "--keep-deltas"),
        ({"disk": replace(FIT.disk, free_bytes=10 * GB)}, "disk room", "unfit", "df -h"),
        ({"disk": replace(FIT.disk, kind="tmpfs")}, "disk kind", "warn", "--state"),
        ({"speed": DiskSpeed(2e7, 1e-3)}, "disk speed", "warn", "--state"),
        ({"speed": DiskSpeed(1e9, 0.2)}, "disk speed", "warn", "--state"),
        ({"speed": DiskSpeed(fault="Permission denied")}, "disk speed", "unfit", "ls -ld"),
        ({"descriptors": 64}, "open files", "unfit", "ulimit"),
        ({"descriptors": 1024}, "open files", "warn", "ulimit"),
        ({"clock_synchronized": False}, "clock", "warn", "timedatectl set-ntp true"),
        ({"ports": (Port(("hub",), "--listen", ":7077", 7077, "the port is in use"),)}, "port", "unfit", ":7077"),
        ({"bbr_usable": False}, "congestion", "warn", "tcp_allowed_congestion_control='bbr cubic reno'"),
        ({"bbr_usable": False, "congestion_available": ("cubic",)}, "congestion", "warn", "modprobe tcp_bbr"),
        ({"window_bytes": 1e5}, "buffers", "warn", "tcp_wmem"),
    ],
)
def test_each_fault_is_found_with_its_remedy(changed, check, outcome, remedy):
    facts = replace(FIT, **changed)
    assert (check, outcome) in outcomes(facts)
    remedies = [each.remedy for each in judge(facts, ROLES, 16 * GB) if (each.check, each.outcome) == (check, outcome)]
    assert any(remedy in each for each in remedies), remedies


def test_a_shadow_that_is_there_already_counts_as_free_tmpfs():
    full = replace(FIT, shm=replace(FIT.shm, free_bytes=10 * GB))
    assert ("tmpfs room", "unfit") in outcomes(full)
    assert outcomes(replace(full, held_shadow_bytes=20 * GB)) == {}


def test_the_size_of_the_model_is_needed_to_judge_room():
    assert set(outcomes(FIT, None)) == {("tmpfs room", "unknown"), ("memory", "unknown"), ("disk room", "unknown")}


def test_few_open_files_are_enough_for_a_peer():
    few = replace(FIT, descriptors=1024)
    assert outcomes(few, roles=("peer",)) == {}
    assert outcomes(few)[("open files", "warn")] == ["hub"]


def test_findings_name_asked_roles_alone():
    for each in judge(FIT, ("peer",), GB):
        assert each.roles == ("peer",)


def test_the_roles_of_a_machine_follow_from_its_packages():
    assert could_run(FIT.packages) == list(ROLES)
    assert could_run({"sglang": ""}) == ["hub", "peer", "engine", "ledger"]
    assert could_run({"torch": "2.13.0"}) == could_run(None) == ["hub", "peer", "ledger"]


def test_an_unknown_fact_is_never_fit():
    for field in fields(MachineFacts):
        if field.name in (
            "ports",
            "held_shadow_bytes",
            "container_limit_bytes",
            "congestion_default",
            "congestion_available",
        ):
            continue  # may be empty: nothing was asked for, there is no limit, or BBR is usable
        unknown = replace(FIT, **{field.name: getattr(MachineFacts(), field.name)})
        assert any(outcome == "unknown" for _, outcome in outcomes(unknown)), field.name
    assert {each.outcome for each in judge(MachineFacts(), ROLES, GB)} == {"unknown"}


TEXTS = st.text(max_size=80)
NUMBERS = st.none() | st.integers(-(1 << 70), 1 << 70)
FLOATS = st.none() | st.floats()
FLAGS = st.none() | st.booleans()
VOLUMES = st.none() | st.builds(Volume, TEXTS, st.none() | TEXTS, NUMBERS, NUMBERS, NUMBERS, FLAGS)
FACTS = st.builds(
    MachineFacts,
    python=st.lists(st.integers(0, 20), max_size=3).map(tuple),
    system=TEXTS,
    user=NUMBERS,
    packages=st.none() | st.dictionaries(st.sampled_from(["vllm", "sglang", "torch", "optimi"]), TEXTS),
    gpus=st.none() | st.lists(TEXTS, max_size=3).map(tuple),
    cores=NUMBERS,
    memory_bytes=NUMBERS,
    memory_available_bytes=NUMBERS,
    container_limit_bytes=NUMBERS,
    shm=VOLUMES,
    held_shadow_bytes=st.integers(0, 1 << 60),
    state=st.none() | st.builds(StateFolder, TEXTS, FLAGS, st.booleans(), NUMBERS, NUMBERS, FLAGS, NUMBERS),
    disk=VOLUMES,
    speed=st.none() | st.builds(DiskSpeed, FLOATS, FLOATS, TEXTS),
    descriptors=NUMBERS,
    clock_synchronized=FLAGS,
    ports=st.lists(
        st.builds(Port, st.just(ROLES), st.just("--listen"), TEXTS, st.integers(0, 65535), TEXTS), max_size=3
    ).map(tuple),
    ipv6=FLAGS,
    congestion_available=st.none() | st.lists(TEXTS, max_size=3).map(tuple),
    bbr_usable=FLAGS,
    congestion_default=TEXTS,
    window_bytes=FLOATS,
)


@given(FACTS, st.sets(st.sampled_from(ROLES)), st.none() | st.integers(0, 1 << 50))
def test_every_finding_is_one_short_text_with_a_remedy(facts, roles, size_bytes):
    for each in judge(facts, roles, size_bytes):
        assert each.outcome in OUTCOMES
        assert each.roles
        assert set(each.roles) <= roles
        assert 0 < len(each.text.split()) <= MOST_WORDS
        assert "\n" not in each.text + each.remedy
        assert bool(each.remedy) == (each.outcome != "ok")
