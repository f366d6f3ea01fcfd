"""A worker's registration: its record, its name, and the session of its requests.

Guarantees: two workers that use one name of one caller end up with two names. Workers are bounded in number, and so are
the names of one certificate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from sqlalchemy import Connection, func, insert, select, update

from p2pcast.ledger_api.worker_api import Registered, Registration
from trainer_node.ledger import leasing
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.ledger_rows import BEARER, MAX_NAMES, MAX_WORKERS, CapReachedError, Present

COUNTS = (
    *("blamed", "unknown_versions", "accepted_tokens", "audits", "disagreements"),
    *("replays", "false_rewards", "failed_replays"),
)
"""Columns of a worker that begin at 0."""
MAX_NAME_TEXT = 120
"""Characters that stay of a name which gets a number."""


class Registrations:
    """Knows the sessions that other registrations have ended."""

    def __init__(self, new_id: Callable[[], bytes]) -> None:
        self._new_id = new_id
        self._displaced: dict[bytes, None] = {}
        """Sessions that another registration has ended, the newest MAX_WORKERS."""

    def register(
        self,
        conn: Connection,
        now: Present,
        caller: str,
        one: Registration,
    ) -> Registered:
        """As ``Ledger.register``. Raises CapReachedError."""
        session = self._new_id()
        name = self._name_of(conn, caller, one.name, one.lost)
        stated = {
            "session": session,
            "price_usd_h": one.price_usd_h or 0.0,
            "slots": one.slots,
            "task": one.task,
            "task_hash": one.task_hash,
            "device_class": (one.classes and one.classes.gpu) or "",
            "seen_s": now.now_s,
        }
        mine = (db.workers.c.caller == caller) & (db.workers.c.name == name)
        known = conn.execute(select(db.workers.c.id, db.workers.c.session).where(mine)).first()
        count = int(conn.scalar(select(func.count()).select_from(db.workers)) or 0)
        if known is not None:
            conn.execute(update(db.workers).where(mine).values(**stated))
            if bytes(known.session) != one.lost:
                self._displaced[bytes(known.session)] = None
                if len(self._displaced) > MAX_WORKERS:
                    del self._displaced[next(iter(self._displaced))]
            if one.leases is not None:
                leasing.give_up(conn, bytes(known.id), frozenset(one.leases))
            return Registered(bytes(known.id), session, name)
        if count >= MAX_WORKERS:
            raise CapReachedError(f"{MAX_WORKERS} workers are registered already")
        own = select(func.count()).select_from(db.workers).where(db.workers.c.caller == caller)
        if caller != BEARER and int(conn.scalar(own) or 0) >= MAX_NAMES:
            raise CapReachedError(f"{MAX_NAMES} workers are registered with this certificate already")
        worker = self._new_id()
        first = {"id": worker, "caller": caller, "name": name, **dict.fromkeys(COUNTS, 0)}
        conn.execute(insert(db.workers).values(**first, **stated))
        return Registered(worker, session, name)

    def _name_of(self, conn: Connection, caller: str, name: str, lost: bytes | None) -> str:
        """The name, unless another worker has taken its record over from a worker that is still there: both would take
        it from each other for ever.
        """
        if lost is None or lost not in self._displaced:
            return name
        taken = set(conn.scalars(select(db.workers.c.name).where(db.workers.c.caller == caller)))
        return next(other for n in itertools.count(2) if (other := f"{name[:MAX_NAME_TEXT]}-{n}") not in taken)
