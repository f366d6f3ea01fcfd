"""Formats the ledger's /status document for people."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from p2pcast.cli.status_document import StatusObject, failure_lines

SHOWN_REJECTED = 3
"""Newest rejected jobs and prompts that are named."""


def ledger_heading(ledger: StatusObject) -> Text:
    """Return four lines (the run, groups and batches, leases and verdicts, ages), followed by any problems."""
    line = f"task {ledger.text('task')}  learner at {ledger.text('learner')}  epoch {ledger.text('epoch')}"
    line += f"  rule {ledger.text('rule')}  staleness bound {ledger.text('staleness')}"
    if ledger.text("finished") == "True":
        line += "  the run has ended"
    line += f"\ngroups: {_counts(ledger.part('groups'))}; {ledger.text('ahead', '0')} ahead of the learner"
    line += f"; batches: {_counts(ledger.part('batches'))}"
    line += f"\nleases: {_counts(ledger.part('leases'))}; {ledger.text('waiting_requests', '0')} requests wait"
    line += f"\nresults: {_counts(ledger.part('results'))}"
    if reasons := ledger.part("rejections"):
        line += f" ({_counts(reasons)})"
    line += _rejected(ledger)
    line += _ages("in flight", ledger.part("ages").part("in_flight"))
    line += _ages("in queue", ledger.part("ages").part("in_queue"))
    line += _probes(ledger.part("probes"))
    if ledger.text("hub_reached") == "False":
        line += "\nthe hub is out of reach: new versions are not known"
    if delayed := ledger.text("delayed"):
        line += f"\ndelayed: {delayed}"
    if idle := ledger.text("idle"):
        line += f"\nnothing is leased: {idle}"
    return Text(line + failure_lines(ledger))


def workers_table(ledger: StatusObject) -> Table:
    out = Table("worker", "leases", "slots", "serves", "accepted", "rate", "silent", "price", "trouble")
    for worker in ledger.rows("workers"):
        cells = [
            worker.text("name"),
            worker.text("leases"),
            worker.text("slots"),
            worker.text("served", "-"),
            f"{worker.text('accepted_tokens', '0')} tokens",
            f"{worker.number('tokens_per_s'):.0f} tokens/s" if worker.has("tokens_per_s") else "-",
            f"{worker.number('silent_s'):.0f} s",
            f"{worker.number('price_usd_h'):.2f} USD/h" if worker.number("price_usd_h") else "-",
            _trouble(worker),
        ]
        out.add_row(*map(Text, cells))
    return out


def _trouble(worker: StatusObject) -> str:
    found = []
    if worker.number("drained_s"):
        found.append(f"drained for {worker.number('drained_s'):.0f} s more")
    if worker.number("blamed"):
        found.append(f"{worker.text('blamed')} malformed or forged")
    if worker.number("false_rewards"):
        found.append(f"{worker.text('false_rewards')} false rewards")
    if worker.number("disagreements"):
        found.append(f"{worker.text('disagreements')} of {worker.text('audits')} audits disagree")
    return ", ".join(found)


def rollouts_line(rollouts: StatusObject) -> str:
    """Return one line for the hub's table, from the ledger's summary."""
    line = f"\nrollouts of {rollouts.text('task')}: learner at {rollouts.text('learner')}"
    line += f", {rollouts.text('workers', '0')} workers"
    if silent := rollouts.number("silent_workers"):
        line += f" ({silent:.0f} silent)"
    line += f", {rollouts.part('leases').text('held', '0')} leases, {rollouts.number('tokens_per_s'):.0f} tokens/s"
    if alarm := rollouts.number("probe_alarm"):
        line += f"; ALARM: weights of {alarm:.0f} engines are not those of their version"
    if missing := rollouts.number("probe_missing"):
        line += f"; probes of {missing:.0f} engines fail"
    if delayed := rollouts.text("delayed"):
        line += f"; delayed: {delayed}"
    if idle := rollouts.text("idle"):
        line += f"; nothing is leased: {idle}"
    if rollouts.number("age_s") > 10:
        line += f"; the ledger has been silent for {rollouts.number('age_s'):.0f} s"
    return line


def _probes(probes: StatusObject) -> str:
    """Return the results of probes, naming workers whose probes fail and engines with an alarm; empty if none ran."""
    engines, missing = probes.rows("engines"), [str(name) for name in probes.row("missing")]
    line = ""
    if missing:
        line += f"\nprobes of {', '.join(missing)} fail: the weights are not checked, and the worker's log says why"
    if not engines:
        return line
    largest = max(engine.number("kl") for engine in engines)
    line += f"\nprobes of {len(engines)} engines: KL to the learner at most {largest:.1e} nats a token"
    for engine in engines:
        if engine.text("alarm") == "True":
            line += f"\nALARM: the weights of {engine.text('worker')} are not those of version {engine.text('version')}"
            line += f": KL {engine.number('kl'):.1e}, floor {engine.number('floor'):.1e}"
    return line


def _counts(part: StatusObject) -> str:
    return ", ".join(f"{count} {name}" for name, count in part.items()) or "none"


def _rejected(ledger: StatusObject) -> str:
    """Return the counts of rejected work; empty while every prompt can be played."""
    line = ""
    if jobs := ledger.part("rejected_jobs"):
        line += f"\nrejected jobs: {_counts(jobs)}"
        for job in ledger.rows("newest_rejected_jobs")[-SHOWN_REJECTED:]:
            line += f"\n  {job.text('prompt')}: {job.text('reason')}: {job.text('why')}"
    if ledger.number("rejected_prompts"):
        line += f"\nprompts of which no group can be made: {ledger.text('rejected_prompts')}"
        for prompt in ledger.rows("newest_rejected_prompts")[-SHOWN_REJECTED:]:
            line += f"\n  {prompt.text('name')}: {prompt.text('why')}"
    return line


def _ages(where: str, ages: StatusObject) -> str:
    """Return the ages of rollouts; empty if there are none."""
    if not ages:
        return ""
    return f"\n{where}, by steps behind: " + ", ".join(f"{steps}: {count}" for steps, count in ages.items())
