"""The rules of ``p2pcast doctor`` on the path to another machine with a doctor: facts → findings. Pure.

The promises of ``machine_verdicts`` hold here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from p2pcast.doctor.machine_facts import Finding, Outcome, PathFacts, Role
from p2pcast.doctor.machine_verdicts import brief, chosen

ROLES: tuple[Role, ...] = ("hub", "peer", "learner")
"""Roles that send or receive weights."""
LEAST_BPS = 100e6
"""Bits per second. One hundredth of a model of 16 GB then takes 13 s."""
MOST_LOSS = 0.01
"""Share of bytes sent again. BBR keeps its rate up to about this loss, CUBIC far less."""


def judge_path(facts: PathFacts, roles: Collection[Role]) -> list[Finding]:
    """Findings for ``roles``."""
    return chosen(list(_findings(facts)), roles)


def _findings(facts: PathFacts) -> Iterator[Finding]:
    where = brief(facts.address)
    host, _, port = where.rpartition(":")
    trace = f"mtr -T -P {port} {host}"
    if facts.rtt_s is None:
        text = f"No doctor can be reached at {where}: {brief(facts.fault) or 'no answer'}."
        remedy = f"p2pcast doctor --answer :{port}    # on that machine; its firewall has to admit TCP to this port"
        yield Finding("path", "warn", ROLES, text, remedy)
        return
    text = f"{where} can be reached from here; the round trip takes {facts.rtt_s * 1e3:.1f} ms."
    yield Finding("path", "ok", ROLES, text)
    again = f"p2pcast doctor --to {where}"
    for name, bps, loss in (
        (f"to {where}", facts.there_bps, facts.there_loss),
        (f"from {where}", facts.back_bps, facts.back_loss),
    ):
        if bps is None:
            why = f": {brief(facts.fault)}" if facts.fault else ""
            yield Finding("throughput", "unknown", ROLES, f"Throughput {name} was not measured{why}.", again)
            continue
        outcome: Outcome = "ok" if bps >= LEAST_BPS else "warn"
        text = f"One connection carries {bps / 1e6:.0f} Mbit/s {name}."
        remedy = "" if outcome == "ok" else "p2pcast join … --stripes 16    # more connections; seed --congestion bbr"
        yield Finding("throughput", outcome, ROLES, text, remedy)
        if loss is None:
            yield Finding("loss", "unknown", ROLES, f"Loss {name} is unknown.", trace)
        else:
            outcome = "ok" if loss <= MOST_LOSS else "warn"
            text = f"{loss * 100:.2f} % of the bytes {name} were sent again."
            yield Finding("loss", outcome, ROLES, text, "" if outcome == "ok" else trace)
