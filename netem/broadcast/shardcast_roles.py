"""shardcast's origin and middle nodes, as roles of ``netem.broadcast.contenders``.

The package is unmodified from PyPI. It writes to fixed places (/tmp, its installation folder), so each process gets its
own, as on separate machines. A mount namespace has an empty /tmp that holds a copy of the package.
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

from netem.broadcast.json_lines import PORT, orders, write_facts
from netem.emulation.description import EmulatedNetwork

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
TMP = Path("/tmp")
PROBED = "data1.bin"
"""Every server must have a file of this name, from which clients measure its speed."""
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
"""shardcast's defaults (shards of 50 MB, ten at a time, retries after 2 and 15 s, polling every 30 s) suit files of
gigabytes. The shard size and parallelism here are the best of eight pairs tried with 24 MiB and 8 peers.
"""


def settings_for(network: EmulatedNetwork, payload_bytes: int) -> dict[str, Any]:
    """Over long paths each shard, with its own process and connection, costs more than it gains. Two shards were the
    best there (8 MiB, four hosts in a chain, 50 ms a link).
    """
    if network.only_rates:
        return SETTINGS
    return SETTINGS | {"SHARDCAST_SHARD_SIZE": max(SETTINGS["SHARDCAST_SHARD_SIZE"], -(-payload_bytes // 2))}


def _own_place() -> Path:
    """A private /tmp. Of this machine's /tmp it shows only Python's own files, if Python runs from there."""
    libc = ctypes.CDLL(None, use_errno=True)
    needed = {
        TMP / Path(path).relative_to(TMP).parts[0] for path in (*sys.path, sys.prefix) if TMP in Path(path).parents
    }
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "cannot make a private /tmp")
    opened = {path: os.open(path, os.O_PATH) for path in needed if path.is_dir()}
    if libc.mount(b"tmpfs", bytes(TMP), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "cannot make a private /tmp")
    for path, descriptor in opened.items():
        path.mkdir()
        if libc.mount(f"/proc/self/fd/{descriptor}".encode(), bytes(path), None, MS_BIND | MS_REC, None):
            raise OSError(ctypes.get_errno(), f"{path} cannot be mounted in a private /tmp")
        os.close(descriptor)
    return TMP


def _package(settings: dict[str, Any]) -> Any:
    """``shardcast``, configured, from this process's own copy."""
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
    # The environment variables allow only whole seconds.
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
    """An order is ``{"save": bytes}``, then ``{"go": true}`` to cut them into shards and offer them."""
    package = _package(settings)
    server = package.OriginServer(str(_data()), PORT, settings["SHARDCAST_MAX_DISTRIBUTION_FOLDERS"])
    write_facts(ready=package.__version__)
    payload = TMP / "payload"
    for order in orders():
        if "save" in order:
            payload.write_bytes(os.urandom(order["save"]))
            write_facts(saved=True)
        else:
            server.broadcast(str(payload), settings["SHARDCAST_SHARD_SIZE"])


def middle(settings: dict[str, Any]) -> None:
    """``upstream``: server addresses. An order is ``{"wait": N}``: wait for the Nth version, which arrives by itself.
    The bytes are not checked; shardcast checks them only in its clients.
    """
    package = _package(settings)
    servers = [f"http://{host}:{PORT}" for host in settings["upstream"]]
    node = package.MiddleNode(servers, str(_data()), PORT, settings["check_interval"])
    write_facts(ready=True)
    for order in orders():
        while f"v{order['wait']}" not in node.processed_versions:
            time.sleep(POLL_S)
        write_facts(done_s=time.time())
