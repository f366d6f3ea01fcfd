"""shardcast's origin and middle nodes, as roles of ``netem.broadcast.contenders``.

It is taken as it is from PyPI. Where it writes to fixed places (/tmp, the folder that it is installed in) each process has its own, as each machine would: a mount namespace with
an empty /tmp, in which a copy of the package lies.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from netem.broadcast.speech import PORT, orders, say
from netem.description import Network

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
TMP = Path("/tmp")
PROBED = "data1.bin"
"""Every server must have a file of this name: whoever comes fetches it, to learn how fast it is."""
PROBED_BYTES = 64 << 10
POLL_S = 0.005
SETTINGS: dict[str, Any] = {
    "SHARDCAST_SHARD_SIZE": 128 << 10,
    "SHARDCAST_MAX_DISTRIBUTION_FOLDERS": 2,
    "SHARDCAST_MAX_CONCURRENT_DOWNLOADS": 2,
    "SHARDCAST_FAST_RETRY_INTERVAL": 0.05,
    "SHARDCAST_SLOW_RETRY_INTERVAL": 0.05,
    "check_interval": 0.1,
}
"""Its own (shards of 50 MB, ten at a time, retries after 2 and 15 s, a look for news every 30 s) are for files of gigabytes. The size of shards and how many at a time are the best of eight pairs that
were tried with 24 MiB and 8 peers."""


def settings_for(network: Network, payload_bytes: int) -> dict[str, Any]:
    """Over long ways each shard, which is a process and a connection of its own, costs more than it gains: two of them were the best there (8 MiB, four hosts in a chain, 50 ms a link)."""
    if network.only_rates:
        return SETTINGS
    return SETTINGS | {"SHARDCAST_SHARD_SIZE": max(SETTINGS["SHARDCAST_SHARD_SIZE"], -(-payload_bytes // 2))}


def _own_place() -> Path:
    """A /tmp of its own, in which nothing of this machine's is seen but what Python runs from, where it runs from there."""
    libc = ctypes.CDLL(None, use_errno=True)
    needed = {TMP / Path(path).relative_to(TMP).parts[0] for path in (*sys.path, sys.prefix) if TMP in Path(path).parents}
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no /tmp of its own can be had")
    opened = {path: os.open(path, os.O_PATH) for path in needed if path.is_dir()}
    if libc.mount(b"tmpfs", bytes(TMP), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "no /tmp of its own can be had")
    for path, descriptor in opened.items():
        path.mkdir()
        if libc.mount(f"/proc/self/fd/{descriptor}".encode(), bytes(path), None, MS_BIND | MS_REC, None):
            raise OSError(ctypes.get_errno(), f"{path} can't be had in a /tmp of its own")
        os.close(descriptor)
    return TMP


def _package(settings: dict[str, Any]) -> Any:
    """``shardcast``, out of a copy that nobody else has, set up."""
    spec = importlib.util.find_spec("shardcast")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    place = _own_place()
    shutil.copytree(source, place / "site" / "shardcast")
    sys.path.insert(0, str(place / "site"))
    for name in ("SHARDCAST_SHARD_SIZE", "SHARDCAST_MAX_DISTRIBUTION_FOLDERS", "SHARDCAST_MAX_CONCURRENT_DOWNLOADS"):
        os.environ[name] = str(settings[name])
    os.environ["SHARDCAST_LOG_LEVEL"] = "ERROR"
    package = importlib.import_module("shardcast")
    client: Any = importlib.import_module("shardcast.client")
    # From the environment they come as whole seconds.
    client.SHARDCAST_FAST_RETRY_INTERVAL = settings["SHARDCAST_FAST_RETRY_INTERVAL"]
    client.SHARDCAST_SLOW_RETRY_INTERVAL = settings["SHARDCAST_SLOW_RETRY_INTERVAL"]
    logging.getLogger("shardcast").setLevel(logging.ERROR)
    return package


def _data() -> Path:
    data = TMP / "data"
    data.mkdir()
    (data / PROBED).write_bytes(os.urandom(PROBED_BYTES))
    return data


def origin(settings: dict[str, Any]) -> None:
    """An order is ``{"save": bytes}``, then ``{"go": true}``: they are cut into shards, and offered."""
    package = _package(settings)
    server = package.OriginServer(str(_data()), PORT, settings["SHARDCAST_MAX_DISTRIBUTION_FOLDERS"])
    say(ready=package.__version__)
    payload = TMP / "payload"
    for order in orders():
        if "save" in order:
            payload.write_bytes(os.urandom(order["save"]))
            say(saved=True)
        else:
            server.broadcast(str(payload), settings["SHARDCAST_SHARD_SIZE"])


def middle(settings: dict[str, Any]) -> None:
    """``upstream``: addresses of servers. An order is ``{"wait": N}``: for the Nth version, which comes by itself. What came is not checked: its clients alone do."""
    package = _package(settings)
    servers = [f"http://{host}:{PORT}" for host in settings["upstream"]]
    node = package.MiddleNode(servers, str(_data()), PORT, settings["check_interval"])
    say(ready=True)
    for order in orders():
        while f"v{order['wait']}" not in node.processed_versions:
            time.sleep(POLL_S)
        say(done_s=time.time())
