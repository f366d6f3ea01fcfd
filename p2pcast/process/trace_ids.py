"""Ids of OpenTelemetry traces, computed from the run's version or job. Pure.

Promise: every daemon computes the same id by itself. So the spans of a version meet in one trace, though nothing about
traces is sent between daemons.
"""

from __future__ import annotations

from typing import Final

import blake3

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8


def version_trace(run: str, version: str) -> int:
    """``run``: id in hex. ``version``: as text, ``branch.step``."""
    return _number(TRACE_BYTES, "version", run, version)


def job_trace(job: bytes) -> int:
    """The job's id itself, of 16 bytes."""
    return int.from_bytes(job[:TRACE_BYTES], "big") or 1


def span_id(trace: int, *path: str) -> int:
    """``path``: the span's name, and its place."""
    return _number(SPAN_BYTES, f"{trace:032x}", *path)


def _number(size: int, *words: str) -> int:
    """Never 0, which OpenTelemetry takes for no id."""
    hashed = blake3.blake3(b"p2pcast trace")
    for word in words:
        encoded = word.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(hashed.digest(length=size), "big") or 1
