"""Routes of probes: the learner's probe set to workers, their scores to the learner, its verdicts to people.

Promises: scores count for a version only under the hash of its manifest. Nothing that a worker sends here changes a
job, a result or a lease.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Protocol

import msgpack
from aiohttp import web

from p2pcast.ground import limits
from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from p2pcast.rollouts.probe_set import MAX_PROBE_TOKENS, MAX_SEQUENCES, SCORE_BYTES, ProbeSet, unpacked_scores
from trainer_node.ledger_server.probes.probe_desk import MISSED, Comparison, ProbeDesk, Scored, Verdict
from trainer_node.ledger_server.request_form import HASH_BYTES, ID_BYTES, Form

logger = logging.getLogger("p2pcast.ledger")

MAX_VERDICTS: Final = 1024
MAX_KL: Final = 1e12
MSGPACK: Final = "application/x-msgpack"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Prober(Protocol):
    async def __call__(self, session: bytes, version: Version, manifest: bytes) -> tuple[bytes, str] | None:
        """Id and name of the session's worker; None unless the version has this manifest. Raises UnknownIdError."""


class ProbeRoutes:
    """``form``: reads a body. ``learn``: called before a version is looked up. ``clock``: seconds from any origin."""

    def __init__(
        self,
        desk: ProbeDesk,
        form: Callable[[web.Request], Awaitable[Form]],
        prober: Prober,
        learn: Callable[[Collection[Version]], Awaitable[None]],
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk, self._form, self._prober, self._learn = desk, form, prober, learn
        self._events, self._clock = events, clock

    @property
    def of_workers(self) -> dict[str, Handler]:
        return {"probes/take": self._take, "probes/report": self._report}

    @property
    def of_trainers(self) -> dict[str, Handler]:
        return {"probes/set": self._set, "probes/read": self._read, "probes/judged": self._judged}

    # -- workers

    async def _take(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        session, version = form.hexadecimal("session", ID_BYTES), form.version("served")
        manifest = form.hexadecimal("manifest", HASH_BYTES)
        # Without a learner that probes, no request reads the database.
        prober = None if self._desk.probe_set is None else await self._prober(session, version, manifest)
        found = None if prober is None else self._take_of(*prober, version)
        return _packed({} if found is None else {"set": found.id, "sequences": found.sequences})

    def _take_of(self, worker: bytes, name: str, version: Version) -> ProbeSet | None:
        before = self._desk.misses(worker)
        found = self._desk.take(worker, name, version, self._clock())
        if self._desk.misses(worker) and not before:
            self._events.emit("probe_missing", worker=name, version=str(version))
            logger.warning(
                "%d probes of the engine of worker %s failed, and its weights are not checked: see the worker's log",
                MISSED,
                name,
            )
        return found

    async def _report(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        session, version = form.hexadecimal("session", ID_BYTES), form.version("served")
        manifest, probe_set = form.hexadecimal("manifest", HASH_BYTES), form.hexadecimal("set", ID_BYTES)
        engine, scores = form.text("engine", limits.MAX_ENGINE_NAME, 1), _scores(form, self._desk.probe_set)
        await self._learn({version})
        prober = await self._prober(session, version, manifest)
        if prober is None:
            raise RefusedError(f"version {version} is not known with this manifest")
        worker, name = prober
        missed = self._desk.misses(worker)
        wanted = self._desk.answer(worker, probe_set, Scored(os.urandom(16), name, engine, version, scores))
        if missed and wanted:
            self._events.emit("probe_missing_over", worker=name, version=str(version))
        return web.json_response({"wanted": wanted})

    # -- the learner

    async def _set(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        found = ProbeSet.checked(form.lists("sequences", MAX_SEQUENCES))
        self._desk.put(found)
        return web.json_response({"set": found.id.hex()})

    async def _read(self, request: web.Request) -> web.StreamResponse:
        found = self._desk.read((await self._form(request)).hexadecimal("set", ID_BYTES))
        if found is None:
            return _packed({"known": False})
        rows = [one._asdict() | {"version": str(one.version)} for one in found]
        return _packed({"known": True, "answers": rows})

    async def _judged(self, request: web.Request) -> web.StreamResponse:
        for row in (await self._form(request)).forms("verdicts", MAX_VERDICTS):
            kl, floor = (row.number(name, 0.0, MAX_KL) if row.has(name) else None for name in ("kl", "floor"))
            verdict = Verdict(row.hexadecimal("id", ID_BYTES), kl, floor, row.flag("alarm"))
            if (found := self._desk.judge(verdict)) is not None:
                self._announce(found)
        return web.json_response({})

    def _announce(self, found: Comparison) -> None:
        version = str(found.version)
        if found.began:
            self._events.emit(
                "probe_alarm", worker=found.worker, engine=found.engine, version=version, kl=found.kl, floor=found.floor
            )
            logger.warning(
                "the weights of %s (worker %s) are not those of version %s: KL %.3g nats a token on the probe set;"
                " compare with `p2pcast verify --live`",
                found.engine, found.worker, found.version, found.kl,
            )  # fmt: skip
        elif found.ended:
            self._events.emit(
                "probe_alarm_over", worker=found.worker, engine=found.engine, version=version, kl=found.kl,
                floor=found.floor,
            )  # fmt: skip


def _scores(form: Form, probe_set: ProbeSet | None) -> bytes:
    """Raises UsageError, RemoteError for scores that are not those of one value for each scored token."""
    text = form.text("scores", 2 * SCORE_BYTES * MAX_PROBE_TOKENS)
    if probe_set is not None and len(text) != 2 * probe_set.score_bytes:
        raise UsageError(f"field scores has {len(text)} digits, and the probe set needs {2 * probe_set.score_bytes}")
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        raise UsageError("field scores is not hexadecimal") from None
    unpacked_scores(packed)
    return packed


def _packed(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgpack.packb(document), content_type=MSGPACK)
