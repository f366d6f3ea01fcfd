"""The doctor's conclusions, and that nothing remains of its probes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from netem.emulation import doctor
from netem.emulation.doctor import EmulationCheck, backends, chosen
from netem.emulation.namespaces import NEEDED
from p2pcast.ground.errors import UsageError

ALL = ("root", "namespaces", "veth", "bridge", "tbf", "netem", "bbr", "user-mode-linux")


def without(*names: str) -> list[EmulationCheck]:
    return [EmulationCheck(name, name not in names, "why", "what") for name in ALL]


@pytest.mark.parametrize(
    ("missing", "best"),
    [
        ((), "native"),
        (("netem",), "uml"),
        (("veth",), "uml"),
        (("root",), "uml"),
        (("bridge",), "uml"),
        (("tbf",), "uml"),
        (("netem", "user-mode-linux"), "rate"),
        (("netem", "tbf", "user-mode-linux"), "none"),
        (("namespaces", "user-mode-linux"), "none"),
        (("bridge", "user-mode-linux"), "none"),
        (("bbr",), "native"),
        (ALL, "none"),
    ],
)
def test_the_best_backend_that_works_is_chosen(missing: tuple[str, ...], best: str) -> None:
    assert chosen(backends(without(*missing))) == best


def test_backend_names_missing_features() -> None:
    native, uml, rate = backends(without("netem", "veth"))
    assert native.lacks == ("veth", "netem")
    assert uml.ok
    assert rate.lacks == ("veth",)


def test_the_document_is_json_and_whole() -> None:
    said = json.loads(json.dumps(doctor.document(without("netem"))))
    assert [c["name"] for c in said["checks"]] == list(ALL)
    assert said["backend"] == "uml"
    assert said["backends"][0] == {
        "name": "native",
        "ok": False,
        "what": said["backends"][0]["what"],
        "lacks": ["netem"],
    }


class Recorder:
    """Replaces the running of commands; each ends with ``status``."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.ran: list[list[str]] = []

    def __call__(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        self.ran.append(words)
        return subprocess.CompletedProcess(words, self.status, "", "not allowed\n" if self.status else "")


def test_namespace_is_removed_after_errors() -> None:
    command = Recorder()
    with pytest.raises(ZeroDivisionError), doctor.namespace(command) as space:
        raise ZeroDivisionError
    assert command.ran == [["ip", "netns", "add", space], ["ip", "netns", "delete", space]]
    assert space == f"p2pcast-doctor-{os.getpid()}"


def test_failed_namespace_is_an_error_and_removed() -> None:
    command = Recorder(status=1)
    with pytest.raises(doctor.ProbeError, match="not allowed"), doctor.namespace(command):
        pass
    assert command.ran[-1][:3] == ["ip", "netns", "delete"]


def test_only_namespaces_of_dead_doctors_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (
        f"p2pcast-doctor-{dead.pid}",
        f"p2pcast-doctor-{os.getpid()}",
        "p2pcast-doctor-",
        "p2pcast-doctor-x",
        "other-1",
    ):
        (tmp_path / name).touch()
    monkeypatch.setattr(doctor, "NAMES", tmp_path)
    command = Recorder()
    assert doctor.sweep(command) == [f"p2pcast-doctor-{dead.pid}"]
    assert command.ran == [["ip", "netns", "delete", f"p2pcast-doctor-{dead.pid}"]]


def test_sweep_without_a_namespace_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NAMES", tmp_path / "none")
    assert doctor.sweep(Recorder()) == []


def script(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_user_mode_linux_needs_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "UML_MODULES", tmp_path / "modules")
    script(tmp_path / "linux.uml", "echo 6.1.7\n")
    (without_modules,) = [c for c in doctor.probe() if c.name == "user-mode-linux"]
    assert not without_modules.ok
    assert "sch_netem" in without_modules.reason
    for module in doctor.UML_NEEDED:
        name = f"kernel/net/{module}/{module}.ko"
        (tmp_path / "modules" / "6.1.7" / name).parent.mkdir(parents=True)
        (tmp_path / "modules" / "6.1.7" / name).touch()
    (whole,) = [c for c in doctor.probe() if c.name == "user-mode-linux"]
    assert whole.ok
    for count, told in (("65530", True), ("1048576", False)):
        (tmp_path / "mappings").write_text(f"{count}\n")
        monkeypatch.setattr(doctor, "MAPPINGS", tmp_path / "mappings")
        (checked,) = [c for c in doctor.probe() if c.name == "user-mode-linux"]
        assert checked.ok
        assert ("sysctl -w vm.max_map_count=1048576" in checked.reason) == told

    def refused() -> bool:
        raise UsageError("user-mode Linux does not accept paths with blanks")

    for answer, why in ((lambda: False, "no room for the registers"), (refused, "paths with blanks")):
        monkeypatch.setattr(doctor, "runs_programs", answer)
        (unfit,) = [c for c in doctor.probe() if c.name == "user-mode-linux"]
        assert not unfit.ok
        assert why in unfit.reason


def test_broken_program_fails_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    script(tmp_path / "linux.uml", "echo broken >&2; exit 3\n")
    (check,) = [c for c in doctor.probe() if c.name == "user-mode-linux"]
    assert not check.ok
    assert "broken" in check.reason
    assert "apt-get install" in check.install


def test_missing_iproute2_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    checks = {c.name: c for c in doctor.probe()}
    assert tuple(checks) == ALL
    assert not checks["veth"].ok
    assert all(f"no {tool}" in checks["veth"].reason for tool in NEEDED)


@pytest.mark.root
def test_the_real_machine() -> None:
    checks = {c.name: c for c in doctor.probe()}
    assert tuple(checks) == ALL
    assert checks["root"].ok
    assert checks["namespaces"].ok, checks["namespaces"].reason
    assert all(c.ok != bool(c.install) for c in checks.values())
    assert all(c.reason for c in checks.values())
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"p2pcast-doctor-{os.getpid()}" not in names
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert not any(name in links for name in doctor.LINKS)


def test_the_command(p2pcast) -> None:
    done = p2pcast("lab", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["backend"] in ("native", "uml", "rate", "none")
    assert {c["name"] for c in said["checks"]} == set(ALL)
    assert "chosen: " in p2pcast("lab", "doctor").stdout
    scenarios = json.loads(p2pcast("lab", "list", "--json").stdout)
    assert scenarios[0]["name"] == "doctor"
    works = {b["name"] for b in said["backends"] if b["ok"]} | {"here"}
    for scenario in scenarios[1:]:
        assert {"name", "what", "paper", "minutes"} <= scenario.keys()
        assert scenario["backend"] in works if scenario["runs"] else scenario["why"]
