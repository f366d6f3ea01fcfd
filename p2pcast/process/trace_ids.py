"""Ids of OpenTelemetry traces, computed from the run's version or job. Pure.

Guarantee: every daemon computes the same id independently. So a version's spans end up in one trace, although nothing
about traces is sent between daemons.
"""

from __future__ import annotations

from typing import Final

import blake3

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8


def version_trace(run: str, version: str) -> int:
    """Return the id of a version's trace. ``run``: id in hex. ``version``: as text, ``branch.step``."""
    return _number(TRACE_BYTES, "version", run, version)


def job_trace(job: bytes) -> int:
    """Return the id of a job's trace, which is the job's own 16-byte id."""
    return int.from_bytes(job[:TRACE_BYTES], "big") or 1


def span_id(trace: int, *path: str) -> int:
    """Return a span's id. ``path``: the span's name, and its place in the trace."""
    return _number(SPAN_BYTES, f"{trace:032x}", *path)


def _number(size: int, *words: str) -> int:
    """Hash ``words`` to a number of ``size`` bytes, never 0, which OpenTelemetry treats as no id."""
    hashed = blake3.blake3(b"p2pcast trace")
    for word in words:
        encoded = word.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(hashed.digest(length=size), "big") or 1
