"""A worker's registration: its record, its name, and the session of its requests.

Promises: two workers that use one name of one caller end up with two names. Workers are bounded in number, and so are
the names of one certificate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, func, insert, select, update

from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_SLOTS
from trainer_node.ledger import leasing
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.ledger_rows import BEARER, MAX_NAMES, MAX_WORKERS, FullError, Present

COUNTS = (
    *("blamed", "unknown_versions", "accepted_tokens", "audits", "disagreements"),
    *("replays", "false_rewards", "failed_replays"),
)
"""Columns of a worker that begin at 0."""
MAX_NAME_TEXT = 120
"""Characters that stay of a name which gets a number."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker's statement of itself. ``device_class``: workers of one class are expected to be equally fast."""

    name: str
    slots: int
    task: str
    task_hash: bytes
    price_usd_h: float = 0.0
    device_class: str = ""

    def check(self) -> None:
        """Raises UsageError."""
        if not 1 <= self.slots <= MAX_SLOTS or not 0 <= self.price_usd_h <= 1e6 or not 1 <= len(self.name) <= 128:
            raise UsageError(f"a worker has a name, 1 to {MAX_SLOTS} slots and a price from 0 USD/h")


class Registered(NamedTuple):
    """``worker``: id. ``session``: of the worker's requests from now on."""

    worker: bytes
    session: bytes
    name: str


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
        playing: Collection[bytes] | None,
        lost: bytes | None,
    ) -> Registered:
        """As ``Ledger.register``. Raises FullError."""
        session = self._new_id()
        name = self._name_of(conn, caller, one.name, lost)
        stated = {
            "session": session,
            "price_usd_h": one.price_usd_h,
            "slots": one.slots,
            "task": one.task,
            "task_hash": one.task_hash,
            "device_class": one.device_class[:256],
            "seen_s": now.now_s,
        }
        mine = (db.workers.c.caller == caller) & (db.workers.c.name == name)
        known = conn.execute(select(db.workers.c.id, db.workers.c.session).where(mine)).first()
        count = int(conn.scalar(select(func.count()).select_from(db.workers)) or 0)
        if known is not None:
            conn.execute(update(db.workers).where(mine).values(**stated))
            if bytes(known.session) != lost:
                self._displaced[bytes(known.session)] = None
                if len(self._displaced) > MAX_WORKERS:
                    del self._displaced[next(iter(self._displaced))]
            if playing is not None:
                leasing.give_up(conn, bytes(known.id), frozenset(playing))
            return Registered(bytes(known.id), session, name)
        if count >= MAX_WORKERS:
            raise FullError(f"{MAX_WORKERS} workers are registered already")
        own = select(func.count()).select_from(db.workers).where(db.workers.c.caller == caller)
        if caller != BEARER and int(conn.scalar(own) or 0) >= MAX_NAMES:
            raise FullError(f"{MAX_NAMES} workers are registered with this certificate already")
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
