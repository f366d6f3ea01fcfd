"""Units for systemd: systemd's own checks, and the commands in them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.deploy_files import ROOT
from tests.deploy.kubernetes_files import parsed

SYSTEMD = ROOT / "deploy" / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
PROGRAM = "/opt/p2pcast/bin/p2pcast"
EXPOSURE = {"p2pcast-hub": 1.6, "p2pcast-peer": 1.6, "p2pcast-ledger": 1.5, "p2pcast-worker@": 1.5}
"""By systemd 252, of 10. docs/guides/systemd.md states the same figures."""
COMMANDS = {"p2pcast-hub": "seed", "p2pcast-peer": "join", "p2pcast-ledger": "ledger", "p2pcast-worker@": "work"}
SPECIFIERS = {"%d": "/run/credentials/unit", "%i": "8000", "%l": "gpu1"}


def settings(unit: Path) -> list[tuple[str, str]]:
    text = unit.read_text().replace("\\\n", " ")
    return re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)


def setting(unit: Path, name: str) -> str | None:
    found = [value for key, value in settings(unit) if key == name]
    return found[-1] if found else None


def command(unit: Path, config: Path) -> list[str]:
    program, *words = (setting(unit, "ExecStart") or "").split()
    assert program == PROGRAM
    for specifier, value in SPECIFIERS.items():
        words = [word.replace(specifier, value) for word in words]
    assert not [word for word in words if "%" in word]
    assert "/etc/p2pcast/p2pcast.toml" in words
    return [str(config) if word == "/etc/p2pcast/p2pcast.toml" else word for word in words]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_verifies_the_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(PROGRAM, sys.executable))
    run = subprocess.run(["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert (run.returncode, [line for line in run.stderr.splitlines() if unit.stem in line]) == (0, [])


def test_systemd_refuses_a_setting_that_does_not_exist(tmp_path: Path) -> None:
    copy = tmp_path / "p2pcast-hub.service"
    copy.write_text(
        (SYSTEMD / copy.name).read_text().replace("ProtectHome", "ProtectHouse").replace(PROGRAM, sys.executable)
    )
    run = subprocess.run(["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert "ProtectHouse" in run.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_exposure_is_as_documented(unit: Path) -> None:
    limit = EXPOSURE[unit.stem]
    analyze = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={round(limit * 10)}",
        str(unit),
    ]
    run = subprocess.run(analyze, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    row = re.search(rf"^\| `{re.escape(unit.name)}` .*$", (ROOT / "docs" / "guides" / "systemd.md").read_text(), re.M)
    assert row is not None
    assert f"{limit}" in row[0]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_command_and_configuration_are_read_by_the_command_itself(unit: Path) -> None:
    name, read = parsed(command(unit, SYSTEMD / "p2pcast.toml"))
    assert name == COMMANDS[unit.stem]
    # No two daemons of one machine want the same port, and state lies in the unit's own folder.
    state = f"/var/lib/{setting(unit, 'StateDirectory')}".replace("%i", "8000")
    assert str(read["state"]).startswith(state)


def test_ports_of_one_machine_differ() -> None:
    ports = []
    for unit in UNITS:
        _, read = parsed(command(unit, SYSTEMD / "p2pcast.toml"))
        ports += [read[option][1] for option in ("listen", "http") if read.get(option)]
    assert sorted(ports) == [7077, 7078, 7079, 7080, 7081, 7082]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_exit_codes_that_need_a_person_end_the_restarts(unit: Path) -> None:
    assert setting(unit, "Restart") == "on-failure"
    assert setting(unit, "RestartPreventExitStatus") == "2 3"
    assert setting(unit, "StartLimitIntervalSec") == "0"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_tokens_are_credentials_and_users_are_not_root(unit: Path) -> None:
    assert setting(unit, "DynamicUser") == "yes" or setting(unit, "User") in ("p2pcast", "p2pcast-hub")
    assert "token" not in " ".join(value for key, value in settings(unit) if key == "Environment")
    if "--token-file" in (setting(unit, "ExecStart") or ""):
        assert "--token-file %d/token" in (setting(unit, "ExecStart") or "")
        assert re.fullmatch(r"token:/etc/p2pcast/\w+\.token", setting(unit, "LoadCredential") or "")


def test_shadow_outlives_the_daemons_that_have_one() -> None:
    """systemd removes what a dynamic user leaves in /dev/shm."""
    users = (SYSTEMD / "p2pcast.sysusers").read_text()
    for name in ("p2pcast-hub", "p2pcast-peer"):
        unit = SYSTEMD / f"{name}.service"
        assert setting(unit, "DynamicUser") is None
        assert setting(unit, "RemoveIPC") == "no"
        assert re.search(rf"^u {setting(unit, 'User')} ", users, re.MULTILINE)
