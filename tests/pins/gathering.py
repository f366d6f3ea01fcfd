"""Gathers the answers of a live run's daemons, and the output of commands beside it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from live import HUB, LAST, PEERS, Daemon, Document, Live, Seen, log_lines, run, swarm

NEAR, FAR = PEERS
SMALL_BYTES = 64 * 1024
PATHS = ("/", "/rollouts", "/status", "/healthz", "/readyz", "/metrics", "/events", "/wait", "/commit", "/verify",
         "/lease", "/release", "/evict", "/token", "/token/create", "/token/list", "/token/revoke",
         "/nothing")  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
WAITS = (
    "",
    "?version=soon",
    "?version=0.1&what=rain",
    "?version=0.1&fraction=2",
    f"?version={LAST}",
    f"?version={LAST}&what=staged",
    f"?version={LAST}&what=published",
    "?version=9.9&timeout_s=0",
    "?version=9.9&what=staged&timeout_s=0",
    "?version=9.9&what=published&timeout_s=0",
)


def gathered(folder: Path) -> Seen:
    """Two runs: one with a barrier and a mirror, and one in which others say when engines switch."""
    with swarm(folder / "first") as live:
        first(live)
    with swarm(folder / "second") as other:
        other.seen = live.seen
        second(other)
    return live.seen


def first(live: Live) -> None:
    seen = live.seen
    live.start("barrier")
    live.until(lambda: live.live("0.0"), "the first version is live everywhere")
    hub, near, far = (live.daemons[name] for name in (HUB, NEAR, FAR))
    routes(seen, hub)
    routes(seen, far)
    for step in (1, 2, 3):
        live.published(step)
    live.until(live.settled, "everything has settled")
    for name, daemon in live.daemons.items():
        seen.metrics[name] = daemon.ask("GET", "/metrics").text
        seen.events[name] = daemon.events()
        seen.folders[name] = listed(daemon.state)
        waits(seen, daemon)
        refusals(seen, daemon)
    seen.folders["shadow"] = listed(live.shadows / FAR)
    seen.folders["installed"] = listed(live.folder / "out" / FAR)
    mirror = next((live.folder / "mirror" / "p2pcast-1").iterdir())
    seen.folders["mirror"] = {f"p2pcast-1/<run>/{name}": data for name, data in listed(mirror).items()}
    orders_to_hub(seen, hub)
    keep(seen, far, "verify", "POST", "/verify", {"engine": None}, bearer=True)
    keep(seen, far, "lease", "POST", "/lease", {"wait_s": 60}, bearer=True)
    live.until(lambda: live.look()[FAR]["leases"], "the status shows the lease")
    keep(seen, far, "release", "POST", "/release", {"lease": "00"}, bearer=True)
    keep(seen, far, "commit at a peer that drives its engines", "POST", "/commit", {"version": LAST}, bearer=True)
    commands(live, hub, far)
    keep(seen, hub, "evict", "POST", "/evict", {"peer": NEAR}, bearer=True)
    seen.codes["a peer that was evicted"] = near.process.wait(600)
    live.daemons.pop(NEAR)
    seen.events[HUB] += hub.events()
    seen.codes["a hub at SIGTERM"] = live.daemons.pop(HUB).end()
    live.until(lambda: mirror_used(live.look()[FAR]["mirror"]), "the mirror is used")
    seen.metrics["a peer without its hub"] = far.ask("GET", "/metrics").text
    seen.events[FAR] += far.events()
    seen.codes["a peer at SIGTERM"] = far.end()
    for name in (HUB, NEAR, FAR):
        seen.logs[name] = log_lines(live.folder / f"{name}.log")
    offline(live)


def mirror_used(status: Document) -> bool:
    return bool(status["in_use"] and status["version"])


def second(live: Live) -> None:
    """The answers of POST /commit."""
    live.start("manual", FAR, "--driver", "external")
    hub, near, far = (live.daemons[name] for name in (HUB, NEAR, FAR))
    live.until(lambda: all(live.look()[name]["staged"] == "0.0" for name in PEERS), "the first version is staged")
    keep(live.seen, hub, "commit", "POST", "/commit", {"version": "0.0"}, bearer=True)
    keep(live.seen, hub, "commit of an unknown version", "POST", "/commit", {"version": "7.7"}, bearer=True)
    keep(live.seen, far, "commit of an unknown version", "POST", "/commit", {"version": "7.7"}, bearer=True)
    keep(live.seen, far, "commit", "POST", "/commit", {"version": "newest", "timeout_s": 30}, bearer=True)
    live.until(lambda: live.look()[NEAR]["committed"] == "0.0", "the committed version is live")
    orders = {
        "commit at a hub": ("commit", "0.0", "--state", hub.state),
        "commit at a peer": ("commit", "newest", "--state", far.state),
    }
    printed(live, orders)
    for daemon in (near, far, hub):
        live.daemons.pop(daemon.name).end()


def keep(seen: Seen, daemon: Daemon, said: str, *asked: Any, **how: Any) -> None:
    seen.answers[daemon.name][said] = daemon.ask(*asked, **how)


def routes(seen: Seen, daemon: Daemon) -> None:
    """Each path by each method, with and without the bearer; POST with a body that no command takes."""
    for where in PATHS:
        for method in METHODS:
            if (where, method) == ("/events", "GET"):
                continue  # a stream without an end
            body = b"[]" if method == "POST" else None
            keep(seen, daemon, f"{method} {where}", method, where, body)
            keep(seen, daemon, f"{method} {where} with bearer", method, where, body, bearer=True)


def refusals(seen: Seen, daemon: Daemon) -> None:
    keep(seen, daemon, "another origin", "GET", "/status", Origin="http://elsewhere.example")
    keep(seen, daemon, "another host", "GET", "/status", Host="elsewhere.example")
    keep(seen, daemon, "no JSON", "POST", "/commit", b"{", bearer=True)
    keep(seen, daemon, "a wrong bearer", "POST", "/commit", {}, Authorization="Bearer wrong")
    keep(seen, daemon, "no event's id", "GET", "/events?since=soon")
    keep(seen, daemon, "too large a body", "POST", "/commit", b"1" * (1 << 20), bearer=True)


def waits(seen: Seen, daemon: Daemon) -> None:
    for query in WAITS:
        keep(seen, daemon, f"GET /wait{query}", "GET", f"/wait{query}")


def orders_to_hub(seen: Seen, hub: Daemon) -> None:
    keep(seen, hub, "token/create", "POST", "/token/create", {"role": "peer", "ttl_s": 60, "uses": 1}, bearer=True)
    keep(seen, hub, "token/list", "POST", "/token/list", {}, bearer=True)
    tokens = seen.answers[HUB]["token/list"].document().get("tokens", [])
    ident = tokens[0].get("id") if tokens else None
    keep(seen, hub, "token/revoke", "POST", "/token/revoke", {"id": ident}, bearer=True)
    keep(seen, hub, "token/revoke of nothing", "POST", "/token/revoke", {"id": "0" * 16}, bearer=True)
    keep(seen, hub, "evict nobody", "POST", "/evict", {"peer": "nobody"}, bearer=True)
    keep(seen, hub, "commit with a barrier", "POST", "/commit", {"version": LAST}, bearer=True)


def printed(live: Live, table: dict[str, tuple[object, ...]]) -> None:
    """Two at a time: most of what a command takes is its start."""
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda words: run(*words, "--json"), table.values())
        live.seen.printed |= {said: (one.returncode, one.stdout) for said, one in zip(table, done, strict=True)}


def commands(live: Live, hub: Daemon, far: Daemon) -> None:
    delta = next(iter(sorted((far.state / "deltas").iterdir())))
    made = live.folder / "made.p2pd"
    zero, one, two = (live.folder / "checkpoints" / f"step_{n}" for n in range(3))
    table: dict[str, tuple[object, ...]] = {
        "delta diff": ("delta", "diff", zero, one, "-o", made),
        "status of a hub": ("status", "--state", hub.state),
        "status of a peer": ("status", "--state", far.state),
        "token create": ("token", "create", "--state", hub.state),
        "token list": ("token", "list", "--state", hub.state),
        "verify --live at a peer": ("verify", "--live", "--state", far.state),
        "verify against a hub": ("verify", one, "--against", hub.url),
        "inspect a delta": ("inspect", delta),
        "inspect a state folder": ("inspect", far.state),
        "inspect a checkpoint": ("inspect", one),
        "inspect two checkpoints": ("inspect", zero, one),
    }
    printed(live, table)
    of_a_file: dict[str, tuple[object, ...]] = {
        "delta apply": ("delta", "apply", zero, made, "-o", live.folder / "applied"),
        "verify against a file": ("verify", one, "--against", made),
        "verify another state against a file": ("verify", two, "--against", made),
    }
    printed(live, of_a_file)


def offline(live: Live) -> None:
    printed(
        live,
        {
            "check a hub": ("check", live.folder / HUB, "--shadow", live.shadows / HUB),
            "check a peer": ("check", live.folder / FAR, "--shadow", live.shadows / FAR),
        },
    )


def listed(folder: Path) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    for found in sorted(folder.rglob("*")):
        name = str(found.relative_to(folder))
        if found.is_symlink():
            out[f"{name} (link)"] = b""
        elif found.is_dir():
            out[f"{name}/"] = b""
        else:
            small = found.is_file() and found.stat().st_size <= SMALL_BYTES
            out[name if found.is_file() else f"{name} (socket)"] = found.read_bytes() if small else b""
    return out


def document(text: str | bytes) -> Document | None:
    """None: it is no JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
