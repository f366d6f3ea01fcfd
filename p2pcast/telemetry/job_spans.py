"""The span of one play of a job, in the trace of the job. Pure."""

from __future__ import annotations

from p2pcast.process.trace_ids import job_trace, span_id, version_trace
from p2pcast.rollouts.result import Result
from p2pcast.telemetry.span import Attribute, TraceSpan


def play_span(
    run: str | None, job: bytes, lease: bytes, start_s: float, end_s: float, result: Result | None, error: str | None
) -> TraceSpan:
    """Return the span of a play. ``run``: id in hex. ``result``: None if there is none; ``error`` says why. The span
    links to the traces of the versions that produced the result's tokens.
    """
    trace = job_trace(job)
    attributes: dict[str, Attribute] = {"p2pcast.job": job.hex(), "p2pcast.lease": lease.hex()}
    links: tuple[tuple[int, int], ...] = ()
    if run is not None:
        attributes["p2pcast.run"] = run
    if result is not None:
        versions = sorted({span.version for span in result.spans})
        attributes |= {
            "p2pcast.sampled_tokens": int(result.mask.sum()),
            "p2pcast.reward": float(result.reward),
            "p2pcast.versions": ", ".join(map(str, versions)),
        }
        if run is not None:
            traces = [version_trace(run, str(version)) for version in versions]
            links = tuple((one, span_id(one, "publish")) for one in traces)
    return TraceSpan(
        name="play",
        trace=trace,
        span=span_id(trace, "play", lease.hex()),
        start_s=start_s,
        end_s=end_s,
        attributes=attributes,
        error=error,
        links=links,
    )
