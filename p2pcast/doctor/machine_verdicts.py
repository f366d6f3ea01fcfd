"""The rules by which ``p2pcast doctor`` judges a machine: facts → findings. Pure.

Guarantees: no fact raises an exception; an unknown fact gives ``unknown``, never ``ok``; every finding but ``ok`` has a
remedy; every text has at most 30 words.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from p2pcast.doctor.machine_facts import ROLES, MachineFacts, MachineFinding, Outcome, Port, Role, Volume
from p2pcast.ground.limits import GIB, MIB
from p2pcast.ground.plain_text import shown_text

LEAST_PYTHON = (3, 11)
TRIED_ENGINES = {"vllm": "0.32", "sglang": "0.5.23"}
"""Module of an engine → beginning of the versions that p2pcast was tried with."""
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
LEARNER_MODULES = ("torch", "transformers", "optimi")
SHADOW_MODELS = 1.5
"""Room for a shadow in models: one model, and 16 patches of 6 bytes for each changed bf16 value (1 % of the values)."""
STATE_MODELS: dict[Role, float] = {"hub": 11.0, "peer": 11.0}
"""Room for a state folder in models. Hub: 10 anchors, 100 deltas of 1 % of a model. Peer: an anchor, 1000 deltas."""
LEAST_STATE_MODELS: dict[Role, float] = {"hub": 2.0, "peer": 1.0}
"""Room in models without which no run starts: the hub writes a new anchor before it removes the old one."""
LEAST_FREE_BYTES = GIB
"""Free disk for a ledger's rows and results of a first run."""
LEAST_WRITE_BPS = 100e6
"""Bytes per second. A peer writes every artifact: a slower disk is slower than a link of 1 Gbit/s."""
MOST_SYNC_S = 0.05
"""Seconds. Engines switch after one fsync of the hub, and the ledger answers after one."""
LEAST_DESCRIPTORS, HUB_DESCRIPTORS = 256, 4096
"""Open files: for any daemon, and for a hub of a thousand peers with several connections each."""
LEAST_WINDOW_BYTES = 2 * MIB
"""Half of the kernel's usual greatest buffer: enough for 100 Mbit/s at 150 ms on one connection."""
IN_MEMORY = ("tmpfs", "ramfs")
MOST_REASON_WORDS = 8
_STICKY, _OTHERS_WRITE = 0o1000, 0o002


def judge(facts: MachineFacts, roles: Collection[Role], size_bytes: int | None = None) -> list[MachineFinding]:
    """Findings for ``roles``. ``size_bytes``: size of the model; None: unknown."""
    found = (
        *_software(facts),
        *_compute(facts),
        *_tmpfs(facts, size_bytes),
        *_memory(facts, size_bytes),
        *_state(facts),
        *_disk(facts, roles, size_bytes),
        *_limits(facts),
        *_clock(facts),
        *(_port(port) for port in facts.ports),
        *_network(facts),
    )
    return chosen(found, roles)


def chosen(findings: Sequence[MachineFinding], roles: Collection[Role]) -> list[MachineFinding]:
    """Return the findings that concern ``roles``, each limited to those roles."""
    concerned = [(each, tuple(role for role in each.roles if role in roles)) for each in findings]
    return [replace(each, roles=those) for each, those in concerned if those]


def could_run(packages: Collection[str] | None) -> list[Role]:
    """The roles whose packages are installed."""
    found = set(packages or ())
    have: dict[Role, bool] = {"engine": bool(found & set(TRIED_ENGINES)), "learner": found.issuperset(LEARNER_MODULES)}
    return [role for role in ROLES if have.get(role, True)]


def brief(reason: str) -> str:
    """Return the first words of an error, on one line."""
    words = shown_text(reason).split()
    return " ".join(words[:MOST_REASON_WORDS]) + (" …" if len(words) > MOST_REASON_WORDS else "")


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _whole_gib(nbytes: float) -> int:
    return int(nbytes // GIB) + 1


def _quoted(path: str) -> str:
    return shlex.quote(shown_text(path))


# -- software and processors


def _software(facts: MachineFacts) -> Iterator[MachineFinding]:
    version = ".".join(map(str, facts.python))
    if not facts.python:
        yield MachineFinding("python", "unknown", ROLES, "The Python version is unknown.", "python3 --version")
    elif facts.python < LEAST_PYTHON:
        yield MachineFinding(
            "python", "unfit", ROLES, f"Python {version} is too old; p2pcast needs 3.11.", "uv venv --python 3.11"
        )
    else:
        yield MachineFinding("python", "ok", ROLES, f"Python {version} fits.")
    if facts.system == "linux":
        yield MachineFinding("system", "ok", ROLES, "The system is Linux.")
    elif facts.system:
        text = f"The system is {brief(facts.system)}; p2pcast was tested on Linux alone."
        yield MachineFinding("system", "warn", ROLES, text, "docker run --shm-size 16g -v p2pcast:/state …")
    else:
        yield MachineFinding("system", "unknown", ROLES, "The operating system is unknown.", "uname -a")
    if facts.packages is None:
        text = "The installed Python packages are unknown."
        yield MachineFinding("packages", "unknown", ("engine", "ledger", "learner"), text, "pip list")
        return
    yield from _engines(facts.packages)
    if missing := [name for name in LEARNER_MODULES if name not in facts.packages]:
        text = f"This Python environment lacks {', '.join(missing)}."
        yield MachineFinding("trainer", "unfit", ("learner",), text, "pip install 'p2pcast[trainer]'")
    else:
        yield MachineFinding("trainer", "ok", ("learner",), "torch, transformers and optimi are installed.")
    more = "" if "psycopg" in facts.packages else ", which pip install 'p2pcast[postgres]' adds"
    yield MachineFinding(
        "database", "ok", ("ledger",), f"SQLite is ready; --database postgresql://… needs psycopg{more}."
    )


def _engines(versions: Mapping[str, str]) -> Iterator[MachineFinding]:
    if not any(module in versions for module in TRIED_ENGINES):
        text = "This Python environment has neither vLLM nor SGLang."
        yield MachineFinding("engine", "unfit", ("engine",), text, "pip install 'p2pcast[vllm]'")
    for module, tried in TRIED_ENGINES.items():
        if module not in versions:
            continue
        name, version, remedy = ENGINE_NAMES[module], brief(versions[module]), f"pip install '{module}=={tried}.*'"
        if not version:
            text = f"{name} is installed, in an unknown version."
            yield MachineFinding("engine", "unknown", ("engine",), text, f"pip show {module}")
        elif version.startswith(tried):
            yield MachineFinding("engine", "ok", ("engine",), f"{name} {version} is installed.")
        else:
            text = f"{name} {version} is installed; p2pcast was tried with {tried}."
            yield MachineFinding("engine", "warn", ("engine",), text, remedy)


def _compute(facts: MachineFacts) -> Iterator[MachineFinding]:
    roles: tuple[Role, ...] = ("engine", "learner")
    remedy = "nvidia-smi -L    # in a container: docker run --gpus all …"
    if facts.gpus is None:
        yield MachineFinding("gpu", "unknown", roles, "GPUs are unknown: nvidia-smi gave no answer.", remedy)
    elif not facts.gpus:
        yield MachineFinding(
            "gpu", "warn", roles, "No NVIDIA GPU was found; engine and learner would run on CPUs.", remedy
        )
    else:
        yield MachineFinding("gpu", "ok", roles, f"NVIDIA GPUs: {len(facts.gpus)}.")
    if facts.cores is None:
        yield MachineFinding("cores", "unknown", ROLES, "The number of processor cores is unknown.", "nproc")
    elif facts.cores < 2:
        text = "This process has one core, which decoding and network traffic would share."
        yield MachineFinding("cores", "warn", ROLES, text, "nproc    # in a container: docker run --cpus 4 …")
    else:
        yield MachineFinding("cores", "ok", ROLES, f"This process may use {facts.cores} cores.")


# -- memory


def _tmpfs(facts: MachineFacts, size_bytes: int | None) -> Iterator[MachineFinding]:
    roles: tuple[Role, ...] = ("hub", "peer")
    shm = facts.shm
    if shm is None:
        text = "The shared memory /dev/shm, where the shadow lies, cannot be examined."
        yield MachineFinding("tmpfs", "unknown", roles, text, "df -h /dev/shm")
        return
    path = _quoted(shm.path)
    if shm.writable is False:
        yield MachineFinding("tmpfs", "unfit", roles, f"This user cannot write to {brief(path)}.", f"chmod 1777 {path}")
        return
    if shm.mode is not None and shm.mode & _OTHERS_WRITE and not shm.mode & _STICKY:
        text = f"All users may rename files in {brief(path)}, so daemons refuse a shadow there."
        yield MachineFinding("tmpfs", "unfit", roles, text, f"chmod 1777 {path}")
    if shm.kind is None or shm.writable is None:
        text = f"Whether {brief(path)} is a tmpfs that this user may write to is unknown."
        yield MachineFinding("tmpfs", "unknown", roles, text, f"findmnt -T {path}")
    elif shm.kind not in IN_MEMORY:
        text = f"{brief(path)} is no tmpfs but {brief(shm.kind)}, so the shadow would be on a disk."
        yield MachineFinding("tmpfs", "warn", roles, text, f"mount -t tmpfs -o mode=1777 tmpfs {path}")
    yield _tmpfs_room(shm, facts.held_shadow_bytes, roles, size_bytes)


def _tmpfs_room(shm: Volume, held_bytes: int, roles: tuple[Role, ...], size_bytes: int | None) -> MachineFinding:
    path = _quoted(shm.path)
    if shm.free_bytes is None:
        return MachineFinding("tmpfs room", "unknown", roles, "The free space in tmpfs is unknown.", f"df -h {path}")
    free_bytes = shm.free_bytes + held_bytes
    if size_bytes is None:
        text = f"{gigabytes(free_bytes)} of tmpfs are free; the model's size was not given."
        return MachineFinding("tmpfs room", "unknown", roles, text, "p2pcast doctor --size GB")
    need_bytes = SHADOW_MODELS * size_bytes
    wanted = _whole_gib((shm.total_bytes or free_bytes) - free_bytes + need_bytes)
    remedy = f"mount -o remount,size={wanted}G {path}    # in a container: docker run --shm-size {wanted}g …"
    if free_bytes < size_bytes:
        text = f"{gigabytes(free_bytes)} of tmpfs are free; the shadow takes {gigabytes(size_bytes)}."
        return MachineFinding("tmpfs room", "unfit", roles, text, remedy)
    if free_bytes < need_bytes:
        text = f"{gigabytes(free_bytes)} of tmpfs hold the shadow, but not every patch for slow engines."
        return MachineFinding("tmpfs room", "warn", roles, text, remedy)
    text = f"{gigabytes(free_bytes)} of tmpfs hold the shadow and its patches."
    return MachineFinding("tmpfs room", "ok", roles, text)


def _memory(facts: MachineFacts, size_bytes: int | None) -> Iterator[MachineFinding]:
    roles: tuple[Role, ...] = ("hub", "peer")
    known = [each for each in (facts.memory_bytes, facts.container_limit_bytes) if each is not None]
    if facts.memory_bytes is None:
        yield MachineFinding("memory", "unknown", roles, "The size of this machine's memory is unknown.", "free -h")
        return
    most_bytes = min(known)
    limited = most_bytes != facts.memory_bytes
    where = "The container's memory limit" if limited else "This machine's memory"
    if size_bytes is None:
        text = f"{where} is {gigabytes(most_bytes)}; the model's size was not given."
        yield MachineFinding("memory", "unknown", roles, text, "p2pcast doctor --size GB")
        return
    need_bytes = SHADOW_MODELS * size_bytes
    remedy = f"docker run --memory {_whole_gib(need_bytes)}g …" if limited else "ps -eo rss,args --sort -rss | head"
    if most_bytes < size_bytes:
        text = f"{where} is {gigabytes(most_bytes)}; the shadow alone takes {gigabytes(size_bytes)}."
        yield MachineFinding("memory", "unfit", roles, text, remedy)
    elif facts.memory_available_bytes is None:
        yield MachineFinding(
            "memory", "unknown", roles, f"{where} suffices; how much is available is unknown.", "free -h"
        )
    elif facts.memory_available_bytes + facts.held_shadow_bytes < need_bytes:
        text = (
            f"{gigabytes(facts.memory_available_bytes)} of memory are available; "
            f"shadow and patches take up to {gigabytes(need_bytes)}."
        )
        yield MachineFinding("memory", "warn", roles, text, remedy)
    else:
        yield MachineFinding(
            "memory", "ok", roles, f"{where} is {gigabytes(most_bytes)}, enough for shadow and patches."
        )


# -- disk


def _state(facts: MachineFacts) -> Iterator[MachineFinding]:
    roles: tuple[Role, ...] = ("hub", "peer", "ledger")
    state = facts.state
    if state is None or state.exists is None:
        text = "The state folder cannot be examined."
        yield MachineFinding("state folder", "unknown", roles, text, "p2pcast doctor --state FOLDER")
        return
    path = _quoted(state.path)
    if state.is_link:
        text = "The state folder is a link, which daemons refuse."
        yield MachineFinding("state folder", "unfit", roles, text, f"readlink -f {path}    # give this with --state")
        return
    if not state.is_folder:
        text = "The path of the state folder leads to a file."
        yield MachineFinding("state folder", "unfit", roles, text, f"ls -l {path}    # give another --state")
        return
    if state.parents_safe is False:
        text = "Another user could rename or redirect a parent of the state folder, so daemons refuse it."
        remedy = f"namei -l {path}    # chmod +t the folder that all users may write to"
        yield MachineFinding("state folder", "unfit", roles, text, remedy)
        return
    if state.parents_safe is None or (state.exists and None in (state.owner, state.mode, state.foreign, facts.user)):
        text = "Owner and rights of the state folder are not all known."
        yield MachineFinding("state folder", "unknown", roles, text, f"namei -l {path}")
    elif not state.exists:
        yield MachineFinding("state folder", "ok", roles, "The state folder will be made at the first start.")
    elif state.owner != facts.user:
        text = f"The state folder belongs to user {state.owner}, not to this user ({facts.user})."
        yield MachineFinding("state folder", "unfit", roles, text, f'chown -R "$(id -u)" {path}')
    elif (state.mode or 0) & _OTHERS_WRITE:
        text = "All users may write to the state folder, so daemons refuse it."
        yield MachineFinding("state folder", "unfit", roles, text, f"chmod 700 {path}")
    elif state.foreign:
        text = f"The state folder holds files of other users: {state.foreign}."
        remedy = f'find {path} ! -user "$(id -u)" -exec ls -ld {{}} +'
        yield MachineFinding("state folder", "unfit", roles, text, remedy)
    else:
        yield MachineFinding("state folder", "ok", roles, "The state folder belongs to this user alone.")


def _disk(facts: MachineFacts, roles: Collection[Role], size_bytes: int | None) -> Iterator[MachineFinding]:
    daemons: tuple[Role, ...] = ("hub", "peer", "ledger")
    disk = facts.disk
    if disk is None or disk.free_bytes is None:
        text = "The disk of the state folder cannot be examined."
        yield MachineFinding("disk room", "unknown", daemons, text, "df -h    # and give --state FOLDER")
    else:
        yield from _disk_room(disk, disk.free_bytes, roles, size_bytes)
        if disk.kind in IN_MEMORY:
            text = "The state folder lies in memory, so a reboot would end the run and lose the rollouts."
            yield MachineFinding(
                "disk kind", "warn", ("hub", "ledger"), text, "p2pcast doctor --state FOLDER_ON_A_DISK"
            )
    yield from _speed(facts, daemons)


def _disk_room(
    disk: Volume, free_bytes: int, roles: Collection[Role], size_bytes: int | None
) -> Iterator[MachineFinding]:
    look = f"df -h {_quoted(disk.path)}    # free some, or give another --state"
    if free_bytes < LEAST_FREE_BYTES:
        text = f"{gigabytes(free_bytes)} of disk are free, less than {gigabytes(LEAST_FREE_BYTES)}."
        yield MachineFinding("disk room", "warn", ("ledger",), text, look)
    else:
        yield MachineFinding("disk room", "ok", ("ledger",), f"{gigabytes(free_bytes)} of disk are free.")
    for role, models in STATE_MODELS.items():
        if role not in roles:
            continue
        if size_bytes is None:
            text = f"{gigabytes(free_bytes)} of disk are free; the model's size was not given."
            yield MachineFinding("disk room", "unknown", (role,), text, "p2pcast doctor --size GB")
        elif free_bytes < (least := LEAST_STATE_MODELS[role] * size_bytes):
            text = f"{gigabytes(free_bytes)} of disk are free; a {role} needs {gigabytes(least)} at its start."
            yield MachineFinding("disk room", "unfit", (role,), text, look)
        elif free_bytes < models * size_bytes:
            most = gigabytes(models * size_bytes)
            text = f"{gigabytes(free_bytes)} of disk are free; a {role}'s folder grows to {most}."
            remedy = f"p2pcast {'seed' if role == 'hub' else 'join'} … --keep-deltas 20 --keep-anchors 2"
            yield MachineFinding("disk room", "warn", (role,), text, remedy)
        else:
            yield MachineFinding("disk room", "ok", (role,), f"{gigabytes(free_bytes)} of disk suffice for a {role}.")


def _speed(facts: MachineFacts, roles: tuple[Role, ...]) -> Iterator[MachineFinding]:
    speed = facts.speed
    look = "p2pcast doctor --state FOLDER_ON_A_FASTER_DISK"
    if speed is not None and speed.fault:
        where = "" if facts.disk is None else f" {_quoted(facts.disk.path)}"
        text = f"This user cannot write beside the state folder: {brief(speed.fault)}."
        yield MachineFinding("disk speed", "unfit", roles, text, f"ls -ld{where}    # then chown, or another --state")
        return
    if speed is None or speed.write_bps is None or speed.sync_s is None:
        yield MachineFinding(
            "disk speed", "unknown", roles, "The speed of the state folder's disk was not measured.", look
        )
        return
    text = f"The disk writes {speed.write_bps / 1e6:.0f} MB/s, and one fsync takes {speed.sync_s * 1e3:.1f} ms"
    if speed.write_bps < LEAST_WRITE_BPS or speed.sync_s > MOST_SYNC_S:
        yield MachineFinding("disk speed", "warn", roles, f"{text}: slow for every version and every result.", look)
    else:
        yield MachineFinding("disk speed", "ok", roles, f"{text}.")


# -- limits, clock, network


def _limits(facts: MachineFacts) -> Iterator[MachineFinding]:
    roles: tuple[Role, ...] = ("hub", "peer", "ledger")
    remedy = "ulimit -Hn 65536    # as root; under systemd: LimitNOFILE=65536"
    count = facts.descriptors
    if count is None:
        yield MachineFinding("open files", "unknown", roles, "The limit of open files is unknown.", "ulimit -Hn")
    elif count < LEAST_DESCRIPTORS:
        yield MachineFinding("open files", "unfit", roles, f"A process may open only {count} files.", remedy)
    elif count < HUB_DESCRIPTORS:
        text = f"A process may open {count} files, too few for a hub of a thousand peers."
        yield MachineFinding("open files", "warn", ("hub",), text, remedy)
        yield MachineFinding("open files", "ok", ("peer", "ledger"), f"A process may open {count} files.")
    else:
        yield MachineFinding("open files", "ok", roles, f"A process may open {count} files.")


def _clock(facts: MachineFacts) -> Iterator[MachineFinding]:
    roles: tuple[Role, ...] = ("hub", "peer", "ledger")
    if facts.clock_synchronized is None:
        text = "Whether the clock is synchronised is unknown."
        yield MachineFinding("clock", "unknown", roles, text, "timedatectl status")
    elif facts.clock_synchronized:
        yield MachineFinding("clock", "ok", roles, "The kernel says that the clock is synchronised.")
    else:
        text = "The kernel says that the clock is not synchronised; certificates and tokens need the time."
        yield MachineFinding("clock", "warn", roles, text, "timedatectl set-ntp true")


def _port(port: Port) -> MachineFinding:
    if not port.fault:
        return MachineFinding("port", "ok", port.roles, f"{port.option} {brief(port.address)} is free.")
    text = f"{port.option} {brief(port.address)} cannot be opened: {brief(port.fault)}."
    remedy = f"ss -ltnp 'sport = :{port.number}'    # or give {port.option} another port"
    return MachineFinding("port", "unfit", port.roles, text, remedy)


def _network(facts: MachineFacts) -> Iterator[MachineFinding]:
    roles: tuple[Role, ...] = ("hub", "peer")
    if facts.ipv6 is None:
        yield MachineFinding(
            "ipv6", "unknown", roles, "Whether this machine has an IPv6 address is unknown.", "ip -6 address"
        )
    else:
        text = "This machine has a global IPv6 address." if facts.ipv6 else "IPv4 alone: no global IPv6 address."
        yield MachineFinding("ipv6", "ok", roles, text)
    yield from _congestion(facts, roles)
    if facts.window_bytes is None:
        text = "The kernel's greatest TCP buffers are unknown."
        yield MachineFinding("buffers", "unknown", roles, text, "sysctl net.ipv4.tcp_wmem net.ipv4.tcp_rmem")
    elif facts.window_bytes < LEAST_WINDOW_BYTES:
        text = f"One connection may have {facts.window_bytes / MIB:.1f} MiB in flight, too few for long links."
        yield MachineFinding("buffers", "warn", roles, text, buffers_remedy(6 * MIB))
    else:
        text = f"One connection may have {facts.window_bytes / MIB:.1f} MiB in flight."
        yield MachineFinding("buffers", "ok", roles, text)


def buffers_remedy(most_bytes: int) -> str:
    """The command that lets the kernel grow TCP buffers up to ``most_bytes``."""
    return f"sysctl -w net.ipv4.tcp_wmem='4096 16384 {most_bytes}' net.ipv4.tcp_rmem='4096 131072 {most_bytes}'"


def _congestion(facts: MachineFacts, roles: tuple[Role, ...]) -> Iterator[MachineFinding]:
    available = facts.congestion_available
    outcome: Outcome = "warn"
    default = brief(facts.congestion_default) or "the kernel's default"
    if facts.bbr_usable:
        yield MachineFinding("congestion", "ok", roles, "Links can use BBR.")
        return
    if facts.bbr_usable is None or available is None:
        outcome, text = "unknown", "The kernel's congestion controls are unknown."
        remedy = "sysctl net.ipv4.tcp_available_congestion_control"
    elif "bbr" in available:
        text = f"The kernel has BBR but does not allow it to this user; links use {default}."
        remedy = f"sysctl -w net.ipv4.tcp_allowed_congestion_control={shlex.quote(shown_text(' '.join(available)))}"
    else:
        text = f"The kernel has not loaded BBR; links use {default}, which is slow on lossy paths."
        remedy = "modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"
    yield MachineFinding("congestion", outcome, roles, text, remedy)
