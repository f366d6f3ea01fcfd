"""The rules of ``p2pcast doctor`` on other machines: a hub that was reached from here, or was not, and the path to
another machine with a doctor. Facts → findings. Pure.

The promises of ``machine_verdicts`` hold here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from statistics import median

from p2pcast.doctor.machine_facts import HubFacts, MachineFinding, Outcome, PathFacts, Role
from p2pcast.doctor.machine_verdicts import brief, buffers_remedy, chosen
from p2pcast.ground.limits import MAX_STRIPES, MIB

HUB_ROLES: tuple[Role, ...] = ("peer", "ledger", "learner")
"""Roles that dial the hub."""
SYN_REPEATED_S = 0.9
"""A lost first packet of a connection is repeated after one second (RFC 6298, section 2.1)."""
WISHED_BPS = 1e9
"""Rate to the hub, in bits per second, that buffers should not limit."""
AUTO_STRIPES = 16
"""Most connections of a link with ``--stripes auto``."""
MOST_OFFSET_S = 5.0
"""Difference of clocks in seconds that is worth a correction: tokens and leases end by the hub's clock."""
MOST_OFFSET_AT_ALL_S = 12 * 3600.0
"""Certificates are valid from one day before their issue; half of that is left for delays of the correction."""
_SET_CLOCK = "timedatectl set-ntp true"

assert AUTO_STRIPES <= MAX_STRIPES
PATH_ROLES: tuple[Role, ...] = ("hub", "peer", "learner")
"""Roles that send or receive weights."""
LEAST_BPS = 100e6
"""Bits per second. One hundredth of a model of 16 GB then takes 13 s."""
MOST_LOSS = 0.01
"""Share of bytes sent again. BBR keeps its rate up to about this loss, CUBIC far less."""


def judge_hub(
    facts: HubFacts, roles: Collection[Role], window_bytes: float | None = None, *, throughput_known: bool = False
) -> list[MachineFinding]:
    """Findings for ``roles``. ``window_bytes``: most bytes in flight on one connection; None: unknown.
    ``throughput_known``: a doctor on the hub's machine tells it (``judge_path``).
    """
    found = [*_reached(facts, window_bytes), *_hub_clock(facts), *_not_measured(throughput_known=throughput_known)]
    return chosen(found, roles)


def _reached(facts: HubFacts, window_bytes: float | None) -> Iterator[MachineFinding]:
    hub = brief(facts.address)
    port = facts.address.rpartition(":")[2] or "7077"
    if not facts.connects_s:
        if not facts.attempts:
            yield MachineFinding(
                "hub", "unknown", HUB_ROLES, f"No connection to {hub} was tried.", f"p2pcast doctor --hub {hub}"
            )
            return
        text = f"The hub {hub} cannot be reached: {brief(facts.fault) or 'no answer'}."
        remedy = f"ss -ltn 'sport = :{port}'    # on the hub's machine; its firewall has to admit TCP to this port"
        yield MachineFinding("hub", "unfit", HUB_ROLES, text, remedy)
        return
    yield from _round_trip(facts, hub, window_bytes)
    yield from _identity(facts, hub)


def _round_trip(facts: HubFacts, hub: str, window_bytes: float | None) -> Iterator[MachineFinding]:
    rtt_s, done = median(facts.connects_s), len(facts.connects_s)
    late = sum(each >= min(facts.connects_s) + SYN_REPEATED_S for each in facts.connects_s)
    lost = late + max(0, facts.attempts - done)
    text = f"{done} of {facts.attempts} connections to {hub} succeeded; the median took {rtt_s * 1e3:.1f} ms."
    if lost:
        yield MachineFinding("hub", "warn", HUB_ROLES, f"{text[:-1]}; {lost} lost a packet.", f"mtr -T -P 7077 {hub}")
    else:
        yield MachineFinding("hub", "ok", HUB_ROLES, text)
    if window_bytes is None or rtt_s <= 0:
        return
    most_bps = AUTO_STRIPES * window_bytes * 8 / rtt_s
    text = f"The kernel's buffers allow {most_bps / 1e6:.0f} Mbit/s on {AUTO_STRIPES} connections at this round trip."
    if most_bps < WISHED_BPS:
        yield MachineFinding("hub buffers", "warn", HUB_ROLES, text, buffers_remedy(64 * MIB))
    else:
        yield MachineFinding("hub buffers", "ok", HUB_ROLES, text)


def _identity(facts: HubFacts, hub: str) -> Iterator[MachineFinding]:
    if facts.plaintext:
        text = f"With --plaintext, what answers at {hub} is not told before a join."
        yield MachineFinding("hub identity", "unknown", HUB_ROLES, text, f"p2pcast join {hub} --plaintext …")
    elif facts.tls is None:
        text = f"No TLS handshake with {hub} was tried."
        yield MachineFinding("hub identity", "unknown", HUB_ROLES, text, f"p2pcast doctor --hub {hub}")
    elif not facts.tls:
        text = f"{hub} accepts connections but no TLS: {brief(facts.tls_fault) or 'no handshake'}."
        yield MachineFinding(
            "hub identity", "unfit", HUB_ROLES, text, f"p2pcast doctor --hub {hub} --plaintext    # if the hub has it"
        )
    elif facts.role != "hub":
        what = f"a {brief(facts.role)}" if facts.role else "a program other than p2pcast"
        text = f"{what.capitalize()} answers at {hub}, not a hub."
        yield MachineFinding(
            "hub identity", "unfit", HUB_ROLES, text, "p2pcast status    # on the hub's machine: its address"
        )
    elif facts.token_run and facts.token_run != facts.run:
        text = f"The token is for another run than the hub at {hub}."
        yield MachineFinding(
            "hub identity", "unfit", HUB_ROLES, text, "p2pcast token create -o token    # on the hub's machine"
        )
    else:
        fits = "of the token's run " if facts.token_run else ""
        text = f"A hub {fits}answers over TLS; the signature of its certificate is verified at the join."
        yield MachineFinding("hub identity", "ok", HUB_ROLES, text)
    if facts.token_encrypts is not None and facts.token_encrypts == facts.plaintext:
        need = "without --plaintext" if facts.token_encrypts else "with --plaintext"
        text = f"The token belongs to a hub whose peers join {need}."
        remedy = f"p2pcast join {hub} {'' if facts.token_encrypts else '--plaintext '}--token-file FILE"
        yield MachineFinding("token", "unfit", HUB_ROLES, text, remedy)


def _hub_clock(facts: HubFacts) -> Iterator[MachineFinding]:
    if facts.in_force is False:
        text = "By this machine's clock the hub's certificate is not in force: one of the clocks is wrong."
        yield MachineFinding("hub clock", "unfit", HUB_ROLES, text, _SET_CLOCK)
    if facts.clock_offset_s is None:
        why = f": {brief(facts.http_fault)}" if facts.http_fault else ", without its --hub-http address"
        text = f"The hub's clock is unknown{why}."
        yield MachineFinding("hub clock", "unknown", HUB_ROLES, text, "p2pcast doctor --hub-http http://HUB:7078")
        return
    offset_s, error_s = facts.clock_offset_s, facts.clock_error_s or 0.0
    sure_s = abs(offset_s) - error_s
    text = f"The hub's clock is {abs(offset_s):.1f} s {'ahead' if offset_s > 0 else 'behind'}, within {error_s:.1f} s."
    if sure_s > MOST_OFFSET_AT_ALL_S:
        yield MachineFinding("hub clock", "unfit", HUB_ROLES, text, _SET_CLOCK)
    elif sure_s > MOST_OFFSET_S:
        yield MachineFinding("hub clock", "warn", HUB_ROLES, text, _SET_CLOCK)
    elif error_s > MOST_OFFSET_S:
        yield MachineFinding("hub clock", "unknown", HUB_ROLES, text, "timedatectl status    # on both machines")
    else:
        yield MachineFinding("hub clock", "ok", HUB_ROLES, text)


def _not_measured(*, throughput_known: bool) -> Iterator[MachineFinding]:
    text = "Connections from the hub to this machine were not tried."
    remedy = "p2pcast doctor --answer :7079    # then on the hub's machine: p2pcast doctor --to THIS_MACHINE:7079"
    yield MachineFinding("way back", "unknown", ("peer",), text, remedy)
    if throughput_known:
        return
    text = "Throughput to the hub was not measured."
    remedy = "p2pcast doctor --to HUB:7081    # before, on the hub's machine: p2pcast doctor --answer :7081"
    yield MachineFinding("throughput", "unknown", HUB_ROLES, text, remedy)


def judge_path(facts: PathFacts, roles: Collection[Role]) -> list[MachineFinding]:
    """Findings for ``roles``."""
    return chosen(list(_findings(facts)), roles)


def _findings(facts: PathFacts) -> Iterator[MachineFinding]:
    where = brief(facts.address)
    host, _, port = where.rpartition(":")
    trace = f"mtr -T -P {port} {host}"
    if facts.rtt_s is None:
        text = f"No doctor can be reached at {where}: {brief(facts.fault) or 'no answer'}."
        remedy = f"p2pcast doctor --answer :{port}    # on that machine; its firewall has to admit TCP to this port"
        yield MachineFinding("path", "warn", PATH_ROLES, text, remedy)
        return
    text = f"{where} can be reached from here; the round trip takes {facts.rtt_s * 1e3:.1f} ms."
    yield MachineFinding("path", "ok", PATH_ROLES, text)
    again = f"p2pcast doctor --to {where}"
    for name, bps, loss in (
        (f"to {where}", facts.there_bps, facts.there_loss),
        (f"from {where}", facts.back_bps, facts.back_loss),
    ):
        if bps is None:
            why = f": {brief(facts.fault)}" if facts.fault else ""
            yield MachineFinding(
                "throughput", "unknown", PATH_ROLES, f"Throughput {name} was not measured{why}.", again
            )
            continue
        outcome: Outcome = "ok" if bps >= LEAST_BPS else "warn"
        text = f"One connection carries {bps / 1e6:.0f} Mbit/s {name}."
        remedy = "" if outcome == "ok" else "p2pcast join … --stripes 16    # more connections; seed --congestion bbr"
        yield MachineFinding("throughput", outcome, PATH_ROLES, text, remedy)
        if loss is None:
            yield MachineFinding("loss", "unknown", PATH_ROLES, f"Loss {name} is unknown.", trace)
        else:
            outcome = "ok" if loss <= MOST_LOSS else "warn"
            text = f"{loss * 100:.2f} % of the bytes {name} were sent again."
            yield MachineFinding("loss", outcome, PATH_ROLES, text, "" if outcome == "ok" else trace)
