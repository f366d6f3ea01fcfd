"""The network emulation that this machine supports. Features of this kernel are probed by using them; user-mode Linux
is looked for, and not booted.

Promises: probes run in a network namespace of their own, which is removed afterwards, also on failure. All objects are
named ``p2pcast-…``. The next doctor removes the namespace of a killed one. Nothing outside that namespace is touched.
``probe`` examines the machine; all other functions are pure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from netem.emulation.namespaces import NEEDED
from netem.emulation.uml import KERNEL as UML
from netem.emulation.uml import UNFIT, runs_programs
from p2pcast.ground.errors import UsageError

COMMAND_S = 10.0
"""Limit for any command; they take milliseconds."""
CONGESTION = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
UML_MODULES = Path("/usr/lib/uml/modules")
UML_NEEDED = ("veth", "bridge", "sch_netem", "sch_tbf", "tcp_bbr")
MAPPINGS = Path("/proc/sys/vm/max_map_count")
ENOUGH_MAPPINGS = 1 << 20
"""A program in user-mode Linux may need a mapping for each of its pages: so many are 4 GiB."""
NAMES = Path("/run/netns")
PREFIX = "p2pcast-doctor-"
"""Followed by the process id, which distinguishes the namespaces of killed and running doctors."""
LINKS = ("p2pcast-a", "p2pcast-b")
"""The ends of the veth pair; names of links may have 15 characters."""
BRIDGE = "p2pcast-c"

QDISCS = {
    "tbf": ["tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"],
    "netem": ["netem", "delay", "10ms", "loss", "1%"],
}
"""Name → arguments of `tc`."""
KERNEL = "a kernel built with it (distributions' own kernels are; container hosts' kernels often are not)"


@dataclass(frozen=True, slots=True)
class EmulationCheck:
    """One probe. ``install``: the remedy; empty for a successful probe."""

    name: str
    ok: bool
    reason: str
    install: str = ""


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to emulate a WAN. ``lacks``: the failed checks that it needs."""

    name: str
    what: str
    lacks: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.lacks


NEEDS = {
    "native": (
        "rate, delay, loss and reordering, by this kernel",
        ("root", "namespaces", "veth", "bridge", "tbf", "netem"),
    ),
    "uml": ("the same, by a kernel that runs as a process (one CPU)", ("user-mode-linux",)),
    "rate": ("rates only, by this kernel", ("root", "namespaces", "veth", "bridge", "tbf")),
}
"""Backends in order of preference: name → its features, the checks that it needs. Every rate is a token bucket, also
behind netem.
"""

Command = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


def backends(checks: Iterable[EmulationCheck]) -> list[Backend]:
    """All backends in order of preference, with the checks that each lacks here."""
    good = {check.name for check in checks if check.ok}
    return [Backend(name, what, tuple(n for n in needs if n not in good)) for name, (what, needs) in NEEDS.items()]


def chosen(every: Iterable[Backend]) -> str:
    """The best working backend, or ``none``."""
    return next((backend.name for backend in every if backend.ok), "none")


def probe() -> list[EmulationCheck]:
    """Run all checks, in order of dependence. Takes about a second. No rights are needed, but with root more
    is found.
    """
    root = os.geteuid() == 0
    return [
        EmulationCheck(
            "root",
            root,
            "this process is root" if root else "this process is not root",
            "" if root else "run it as root",
        ),
        *_kernel(root),
        _congestion("bbr"),
        _user_mode_linux(),
    ]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with its output; a command over the time limit ends with status 124."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"{words[0]} did not end within {COMMAND_S:.0f} s")


def _why(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[0] if lines else f"{done.args[0]} ended with status {done.returncode}"


# -- the kernel


def _kernel(root: bool) -> Iterator[EmulationCheck]:
    """Namespaces, veth, a bridge and the qdiscs, each probed inside an own namespace."""
    names = ["namespaces", "veth", "bridge", *QDISCS]
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing or not root:
        reason = f"there is no {' and no '.join(missing)} command" if missing else "only root can try"
        install = "apt-get install iproute2 util-linux" if missing else "run it as root"
        yield from (EmulationCheck(name, False, reason, install) for name in names)
        return
    sweep(run)
    try:
        with namespace(run) as space:
            yield EmulationCheck("namespaces", True, f"made {space}")
            yield from _inside(space)
    except ProbeError as error:
        yield EmulationCheck(
            "namespaces", False, str(error), "the right to make network namespaces (CAP_SYS_ADMIN), and " + KERNEL
        )
        yield from (
            EmulationCheck(name, False, "there is no namespace for the probe", "namespaces") for name in names[1:]
        )


def _inside(space: str) -> Iterator[EmulationCheck]:
    one, other = LINKS
    made = run(["ip", "-n", space, "link", "add", one, "type", "veth", "peer", "name", other])
    if made.returncode:
        yield EmulationCheck("veth", False, _why(made), KERNEL)
        yield from (
            EmulationCheck(name, False, "there is no link for the probe", "veth") for name in ("bridge", *QDISCS)
        )
        return
    yield EmulationCheck("veth", True, f"linked {one} and {other}")
    yield _bridge(space, one)
    for name, words in QDISCS.items():
        added = run(["tc", "-n", space, "qdisc", "replace", "dev", one, "root", "handle", "1:", *words])
        shown = run(["tc", "-n", space, "qdisc", "show", "dev", one])
        if added.returncode:
            yield EmulationCheck(name, False, _why(added), KERNEL)
        elif f"qdisc {name} " not in shown.stdout:
            yield EmulationCheck(name, False, f"accepted, but not active: {shown.stdout.strip()}", KERNEL)
        else:
            yield EmulationCheck(name, True, f"active on {one}")
        run(["tc", "-n", space, "qdisc", "del", "dev", one, "root"])


def _bridge(space: str, port: str) -> EmulationCheck:
    for words in (["add", BRIDGE, "type", "bridge"], ["set", port, "master", BRIDGE]):
        done = run(["ip", "-n", space, "link", *words])
        if done.returncode:
            return EmulationCheck("bridge", False, _why(done), KERNEL)
    return EmulationCheck("bridge", True, f"{port} is a port of {BRIDGE}")


class ProbeError(Exception):
    """No namespace can be made; the message gives the reason."""


@contextmanager
def namespace(command: Command) -> Iterator[str]:
    """A named network namespace of this process, for the length of the block. Raises ProbeError."""
    name = f"{PREFIX}{os.getpid()}"
    made = command(["ip", "netns", "add", name])
    try:
        if made.returncode:
            raise ProbeError(_why(made))
        yield name
    finally:
        # Also after a partial failure: the name may exist without a namespace.
        command(["ip", "netns", "delete", name])


def sweep(command: Command) -> list[str]:
    """Remove the namespaces of dead doctors; returns their names."""
    gone = []
    with suppress(OSError):
        for path in sorted(NAMES.iterdir()):
            pid = path.name.removeprefix(PREFIX)
            if path.name.startswith(PREFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
                command(["ip", "netns", "delete", path.name])
                gone.append(path.name)
    return gone


def _congestion(name: str) -> EmulationCheck:
    try:
        known = CONGESTION.read_text().split()
    except OSError as error:
        return EmulationCheck(name, False, f"{CONGESTION}: {error.strerror}", KERNEL)
    reason = f"the kernel offers {', '.join(known)}"
    return EmulationCheck(name, name in known, reason, "" if name in known else f"modprobe tcp_{name}, or {KERNEL}")


# -- programs


def _user_mode_linux() -> EmulationCheck:
    """Asks the kernel for its version, looks for the modules that it needs, and lets it run a program."""
    name, install = "user-mode-linux", "apt-get install user-mode-linux"
    path = shutil.which(UML)
    if path is None:
        return EmulationCheck(name, False, f"there is no {UML} command", install)
    reinstall = "apt-get install --reinstall user-mode-linux"
    try:
        done = run([path, "--version"])
    except OSError as error:
        return EmulationCheck(name, False, f"{path} does not run: {error}", reinstall)
    if done.returncode:
        return EmulationCheck(name, False, f"{path} does not run: {_why(done)}", reinstall)
    version = re.search(r"\d\S*", done.stdout or done.stderr)
    modules = UML_MODULES / (version[0] if version else "")
    found = {file.name.partition(".")[0] for file in modules.rglob("*.ko*")}
    missing = [module for module in UML_NEEDED if module not in found]
    if missing:
        return EmulationCheck(name, False, f"{modules} has no {' and no '.join(missing)} module", install)
    try:
        if not runs_programs():
            return EmulationCheck(name, False, UNFIT, "linux.uml 7.2 or newer, first in PATH; or a kernel with netem")
    except UsageError as error:
        return EmulationCheck(name, False, str(error), "TMPDIR=/tmp, and a path without blanks")
    reason = f"{path} {version[0] if version else ''}, with {' and '.join(UML_NEEDED)}"
    if (allowed := int(MAPPINGS.read_text())) < ENOUGH_MAPPINGS:
        reason += (
            f"; programs of more than {allowed >> 8} MiB, such as those of rl-run, may need sysctl -w "
            f"vm.max_map_count={ENOUGH_MAPPINGS}"
        )
    return EmulationCheck(name, True, reason)


def document(checks: list[EmulationCheck]) -> Mapping[str, object]:
    """For JSON: ``{backend, backends: [{name, ok, what, lacks}], checks: [{name, ok, reason, install}]}``."""
    every = backends(checks)
    return {
        "backend": chosen(every),
        "backends": [{"name": b.name, "ok": b.ok, "what": b.what, "lacks": list(b.lacks)} for b in every],
        "checks": [{"name": c.name, "ok": c.ok, "reason": c.reason, "install": c.install} for c in checks],
    }
