"""The fields of JSON log lines besides the message: the run, the daemon, and the version or job that a line is about.

A line is about the first ``Version`` among its arguments, and about its task's job (``about_job``). ``trace_id`` is the
same as in the job's or version's spans.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

from p2pcast.ground.version import Version
from p2pcast.process.trace_ids import job_trace, version_trace

_DAEMON: Final[dict[str, str]] = {}
"""Facts of this process: ``run``, ``role``, ``name``."""
_JOB: Final[ContextVar[bytes | None]] = ContextVar("job", default=None)


def note_daemon(**facts: str) -> None:
    """Set the daemon's fields for log lines: ``run`` (id in hex), ``role`` (as in /status), ``name`` (the node's)."""
    _DAEMON.update(facts)


@contextlib.contextmanager
def about_job(job: bytes) -> Iterator[None]:
    """Context manager that marks log lines of this task, and of tasks started inside, as being about the job."""
    token = _JOB.set(job)
    try:
        yield
    finally:
        _JOB.reset(token)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = dict(_DAEMON)
    arguments = record.args if isinstance(record.args, tuple) else ()
    version = next((str(one) for one in arguments if isinstance(one, Version)), None)
    job = _JOB.get()
    if version is not None:
        found["version"] = version
        if "run" in found:
            found["trace_id"] = f"{version_trace(found['run'], version):032x}"
    if job is not None:
        found |= {"job": job.hex(), "trace_id": f"{job_trace(job):032x}"}
    return found
