"""``p2pcast doctor`` on this machine: real ports, a real disk, real sockets that answer like no hub."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from netem.fleet.processes import free_port
from p2pcast.cli.machine_doctor import doctor
from p2pcast.doctor import hub_measurements, machine_measurements
from p2pcast.doctor.machine_measurements import disk_speed, measure, volume
from p2pcast.ground.errors import LocalError
from p2pcast.trust.join_token import JoinToken


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """A short test of the disk, and short waits for addresses that do not answer."""
    monkeypatch.setattr(machine_measurements, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(hub_measurements, "WAIT_S", 1.0)


def examined(tmp_path, *arguments):
    """Exit code and JSON document."""
    done = CliRunner().invoke(doctor, ["--json", "--state", str(tmp_path / "state"), *arguments])
    assert isinstance(done.exception, LocalError | None), done.output
    return done.exit_code, json.loads(done.output)


def findings(document, check):
    return [each for each in document["findings"] if each["check"] == check]


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def test_an_occupied_port_is_unfit_and_a_free_one_fit(tmp_path, taken):
    code, document = examined(tmp_path, "--role", "peer", "--listen", f"127.0.0.1:{taken}")
    assert code == 1
    assert document["roles"]["peer"]["unfit"] == ["port"]
    (port,) = findings(document, "port")
    assert str(taken) in port["remedy"]
    code, document = examined(tmp_path, "--role", "peer", "--listen", f"127.0.0.1:{free_port()}")
    assert [each["outcome"] for each in findings(document, "port")] == ["ok"]


def test_a_bound_port_that_does_not_listen_is_occupied_too():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = machine_measurements._port(("hub",), "--listen", "127.0.0.1", sock.getsockname()[1])
    assert port.fault == "the port is in use"


def test_default_ports_come_from_the_commands(tmp_path):
    _, document = examined(tmp_path, "--role", "hub", "--role", "ledger")
    ports = [(each["option"], each["number"]) for each in document["measured"]["machine"]["ports"]]
    assert ports == [("--listen", 7077), ("--http", 7078), ("--http", 7079)]


def test_a_model_larger_than_the_machine_is_unfit_for_a_peer_and_not_for_a_ledger(tmp_path):
    code, document = examined(tmp_path, "--role", "peer", "--size", "1e9")
    assert code == 1
    assert not document["fit"]
    assert {"tmpfs room", "memory", "disk room"} <= set(document["roles"]["peer"]["unfit"])
    _, document = examined(tmp_path, "--role", "ledger", "--size", "1e9")
    assert not {"tmpfs room", "memory"} & set(document["roles"]["ledger"]["unfit"])


def test_an_unreachable_hub_is_unfit(tmp_path):
    code, document = examined(tmp_path, "--role", "peer", "--hub", f"127.0.0.1:{free_port()}")
    assert code == 1
    assert [each["outcome"] for each in findings(document, "hub")] == ["unfit"]
    assert "refused" in findings(document, "hub")[0]["text"]


def test_a_program_without_tls_is_no_hub(tmp_path, taken):
    code, document = examined(tmp_path, "--role", "peer", "--hub", f"127.0.0.1:{taken}")
    assert code == 1
    assert [each["outcome"] for each in findings(document, "hub")] == ["ok"]
    assert [each["outcome"] for each in findings(document, "hub identity")] == ["unfit"]


def test_a_token_for_plain_text_needs_the_option(tmp_path, taken):
    (tmp_path / "token").write_text(str(JoinToken(bytes(16), bytes(20))))
    given = ("--role", "peer", "--hub", f"127.0.0.1:{taken}", "--token-file", str(tmp_path / "token"))
    assert findings(examined(tmp_path, *given)[1], "token") != []
    assert findings(examined(tmp_path, *given, "--plaintext")[1], "token") == []


def test_a_folder_that_other_users_may_change_is_unfit(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    code, document = examined(tmp_path, "--role", "ledger")
    assert code == 1
    assert "chmod 700" in findings(document, "state folder")[0]["remedy"]


def test_nothing_stays_behind(tmp_path):
    examined(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_unknown(tmp_path):
    assert volume(tmp_path / "missing") is None
    assert disk_speed(tmp_path / "missing").fault == os.strerror(2)


def test_a_machine_without_proc_and_sys_is_measured(tmp_path, monkeypatch):
    for name in ("MEMORY", "MOUNTS", "IPV6"):
        monkeypatch.setattr(machine_measurements, name, tmp_path / "missing")
    for name in ("CGROUP_LIMITS", "CGROUP_USED"):
        monkeypatch.setattr(machine_measurements, name, (tmp_path / "missing",))
    monkeypatch.setattr(machine_measurements.ctypes, "CDLL", lambda name: object())
    facts = measure(tmp_path / "state", [])
    assert (facts.memory_bytes, facts.container_limit_bytes, facts.clock_synchronized) == (None, None, None)
    assert facts.shm is not None
    assert facts.shm.kind is None


def test_odd_state_folders_are_measured(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    for odd in ("loop", "loop/below", "file", "file/below", "x" * 300, "missing/below"):
        facts = measure(tmp_path / odd, [], tmp_path / odd)
        assert facts.disk is not None, odd
        assert facts.speed is not None, odd
    assert (
        "state folder"
        in examined(tmp_path, "--role", "peer", "--state", str(tmp_path / "file"))[1]["roles"]["peer"]["unfit"]
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert measure(Path("state"), []).state is not None


def test_a_containers_share_of_processor_time_bounds_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_measurements, "cores", lambda: 8)
    monkeypatch.setattr(machine_measurements, "CGROUP_CPU", tmp_path / "cpu.max")
    for text, cores in (("150000 100000\n", 1), ("300000 100000\n", 3), ("max 100000\n", 8), ("?", 8), ("1 0", 8)):
        (tmp_path / "cpu.max").write_text(text)
        assert machine_measurements._cores() == cores


def test_a_containers_limit_bounds_the_available_memory(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("3000000\n")
    (tmp_path / "used").write_text("1000000\n")
    monkeypatch.setattr(machine_measurements, "CGROUP_LIMITS", (tmp_path / "max",))
    monkeypatch.setattr(machine_measurements, "CGROUP_USED", (tmp_path / "used",))
    facts = measure(tmp_path / "state", [])
    assert (facts.container_limit_bytes, facts.memory_available_bytes) == (3_000_000, 2_000_000)


def test_the_command_prints_lines_with_remedies(tmp_path):
    command = [sys.executable, "-m", "p2pcast.cli", "doctor", "--role", "peer", "--size", "1e9"]
    done = subprocess.run([*command, "--state", str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("p2pcast: this machine is unfit for peer")
    lines = done.stdout.splitlines()
    assert any(line.startswith("unfit   tmpfs room") for line in lines)
    assert any("$ mount -o remount,size=" in line for line in lines)
    assert any(line.startswith("peer    unfit: ") for line in lines)
    assert any(line.startswith("ledger  not examined") for line in lines)


@pytest.mark.parametrize(
    "wrong", [["--plaintext"], ["--hub", "h:1", "--hub-http", "file:///etc/passwd"], ["--size", "0"]]
)
def test_wrong_usage_is_refused(wrong):
    done = subprocess.run(
        [sys.executable, "-m", "p2pcast.cli", "doctor", *wrong], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 2
