"""The hub's secrets and token ledger on disk: missing, damaged, or open to other users."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from p2pcast.ground.errors import LocalError
from p2pcast.trust.join_token import SECRET_BYTES
from trainer_node.admission.trust_files import read_ledger, secret_of

NO_NODES: frozenset[bytes] = frozenset()


def private(path: Path, contents: bytes) -> Path:
    path.write_bytes(contents)
    path.chmod(0o600)
    return path


def test_a_missing_secret_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "token.key"
    secret = secret_of(path)
    assert len(secret) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_of(path) == secret


@pytest.mark.parametrize("size", [0, SECRET_BYTES - 1, SECRET_BYTES + 1])
def test_a_secret_of_another_length_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(LocalError, match="is damaged"):
        secret_of(private(tmp_path / "token.key", bytes(size)))


def test_a_missing_ledger_is_empty(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "trust.json", NO_NODES).rows(0.0) == []
    assert not (tmp_path / "trust.json").exists()


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"7", b'{"tokens": 7}', b'{"tokens": {"x": {}}}', b"\xff"])
def test_a_damaged_ledger_is_refused_with_the_remedy(tmp_path: Path, contents: bytes) -> None:
    path = private(tmp_path / "trust.json", contents)
    with pytest.raises(LocalError, match="restore it from a copy, or remove it"):
        read_ledger(path, NO_NODES)
    assert path.read_bytes() == contents


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o666])
def test_files_that_other_users_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    secret, ledger = private(tmp_path / "token.key", bytes(SECRET_BYTES)), private(tmp_path / "trust.json", b"{}")
    for path in (secret, ledger):
        path.chmod(mode)
    with pytest.raises(LocalError):
        secret_of(secret)
    with pytest.raises(LocalError):
        read_ledger(ledger, NO_NODES)
