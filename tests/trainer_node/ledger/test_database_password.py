"""The password of the ledger's PostgreSQL role is replaced while the ledger runs, by the password file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pcast.ground.errors import LocalError, UsageError
from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.postgresql_cluster import Cluster, postgresql
from trainer_node.ledger.database.ledger_store import LedgerStore

ROLE = "rollouts"
TRIES = 8


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A server that asks the role for its password."""
    with postgresql() as made:
        hba = made.folder / "data" / "pg_hba.conf"
        hba.write_text(f"local all {ROLE} scram-sha-256\n" + hba.read_text())
        made.call("psql", *_as_owner(made), "-c", f"CREATE ROLE {ROLE} LOGIN PASSWORD 'first'")
        made.call("psql", *_as_owner(made), "-c", "SELECT pg_reload_conf()")
        yield made


def _as_owner(cluster: Cluster) -> tuple[str, ...]:
    return ("-h", str(cluster.folder), "-U", "ledger", "-d", "postgres")


def keep(file: Path, password: str) -> None:
    part = file.with_name("part")
    part.write_text(f"*:*:*:{ROLE}:{password}\n")
    part.chmod(0o600)
    part.rename(file)


def test_ledger_runs_on_with_the_new_password(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = cluster.database()
    name = owned.removeprefix("postgresql://ledger@/").partition("?")[0]
    cluster.call("psql", *_as_owner(cluster), "-c", f"ALTER DATABASE {name} OWNER TO {ROLE}")
    url = owned.replace("ledger@", f"{ROLE}@")
    file = tmp_path / "pgpass"
    monkeypatch.setitem(os.environ, "PGPASSFILE", str(file))
    keep(file, "wrong")
    with pytest.raises(UsageError, match="password authentication failed"):
        LedgerStore(tmp_path / "state", url)
    keep(file, "first")
    game = Game(lambda: LedgerStore(tmp_path / "state", url))
    session = game.join("a")
    game.whole_step(session)
    keep(file, "second")
    game.whole_step(session)
    cluster.call("psql", *_as_owner(cluster), "-c", f"ALTER ROLE {ROLE} PASSWORD 'second'")
    game.whole_step(session)
    cluster.end_connections(owned)
    repeated(lambda: game.add(2))
    repeated(lambda: game.whole_step(session))
    assert game.ledger.status()["batches"] == {"applied": game.step}
    # With the file of before, a connection that breaks is not made anew.
    keep(file, "first")
    cluster.end_connections(owned)
    for _ in range(TRIES):
        with pytest.raises(LocalError, match="repeat the call"):
            game.add(1)
    keep(file, "second")
    repeated(lambda: game.add(1))
    game.ledger.close()


def repeated(call: Callable[[], object]) -> None:
    """As the sender of a request does: each connection fails once."""
    for _ in range(TRIES):
        try:
            call()
        except LocalError as error:
            failure = error
        else:
            return
    raise failure
