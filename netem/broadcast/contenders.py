"""``python -m netem.broadcast.contenders ROLE``: one process of a rival system, at one host.

The process exchanges lines of JSON on stdin and stdout: it writes ``{"ready": …}``, then performs its part of a
broadcast for each order, and writes ``{"done_s": Unix time}``. All hosts share the machine's clock. Received bytes are
counted and forwarded, and neither checked nor stored, which favours the rivals.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from netem.broadcast.json_lines import PORT, orders, write_facts

CONNECT_S = 10.0
QUEUED_PIECES = 32
NOTSENT_LOWAT_BYTES = 128 << 10
TORRENT_SETTINGS: dict[str, Any] = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "in_enc_policy": 2,
    "out_enc_policy": 2,
    "connections_limit": 1000,
    "connection_speed": 1000,
    "torrent_connect_boost": 255,
    "min_reconnect_time": 1,
    "unchoke_slots_limit": -1,
    "active_seeds": -1,
    "active_downloads": -1,
    "active_limit": -1,
    "max_peerlist_size": 0,
    "tick_interval": 50,
    "allow_multiple_connections_per_ip": True,
    "smooth_connects": False,
    "request_queue_time": 1,
    "max_out_request_queue": 64,
    "max_allowed_in_request_queue": 2000,
    "whole_pieces_threshold": 1,
    "initial_picker_threshold": 0,
    "piece_extent_affinity": False,
    "send_buffer_watermark": 256 << 10,
    "send_buffer_low_watermark": 64 << 10,
    "suggest_mode": 0,
    "close_redundant_connections": False,
    "predictive_piece_announce": 50,
    "alert_mask": 0,
}
"""All peers connected and unchoked, no slow timers for choosing peers, and small pieces that are announced before they
are hashed.
"""
TORRENT_PIECE_BYTES = 64 << 10
TORRENT_POLL_S = 0.005
TORRENT_AGAIN_S = 2.0
"""Retry interval: two peers that dial each other at once may both hang up, and neither retries by itself."""


OTHER_MODULES = {
    "shardcast-origin": "netem.broadcast.shardcast_roles:origin",
    "shardcast-middle": "netem.broadcast.shardcast_roles:middle",
    "rsync-hub": "netem.broadcast.dense_rivals:rsync_hub",
    "rsync": "netem.broadcast.dense_rivals:rsync",
    "zstd-hub": "netem.broadcast.dense_rivals:zstd_hub",
    "zstd": "netem.broadcast.dense_rivals:zstd",
}
"""Roles in other modules, whose imports the other roles need not pay for."""


def main() -> None:
    roles: dict[str, Callable[[dict[str, Any]], None]] = {
        "chain": chain, "star-hub": star_hub, "star": star, "torrent": torrent,
    }  # fmt: skip
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    if role in OTHER_MODULES:
        module, _, function = OTHER_MODULES[role].partition(":")
        roles[role] = getattr(importlib.import_module(module), function)
    roles[role](settings)


# -- a bare chain: sockets that forward


def chain(settings: dict[str, Any]) -> None:
    """``children``: [host, port] of the fed hosts. ``source``: whether this process has the bytes itself. An order is
    ``{"bytes", "piece"}``.
    """
    above: socket.socket | None = None
    server = socket.create_server(("", PORT))
    write_facts(ready=True)
    lines = orders()
    next(lines)  # all processes are listening
    below = [_connected(child) for child in settings["children"]]
    if not settings["source"]:
        above, _ = server.accept()
    write_facts(ready=True)
    for order in lines:
        pieces: list[queue.Queue[bytes | None]] = [queue.Queue(QUEUED_PIECES) for _ in below]
        senders = [threading.Thread(target=_send, args=pair) for pair in zip(below, pieces, strict=True)]
        for sender in senders:
            sender.start()
        source = _generated(order) if above is None else _received(above, order)
        for piece in source:
            for line in pieces:
                line.put(piece)
        done_s = time.time()
        for line in pieces:
            line.put(None)
        for sender in senders:
            sender.join()
        write_facts(done_s=done_s)


def _connected(address: list[Any]) -> socket.socket:
    sock = socket.create_connection((address[0], address[1]), CONNECT_S)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
    return sock


def _send(sock: socket.socket, pieces: queue.Queue[bytes | None]) -> None:
    while (piece := pieces.get()) is not None:
        sock.sendall(piece)


def _generated(order: dict[str, Any]) -> Iterator[bytes]:
    piece = os.urandom(order["piece"])
    for at in range(0, order["bytes"], len(piece)):
        yield piece[: order["bytes"] - at]


def _received(above: socket.socket, order: dict[str, Any]) -> Iterator[bytes]:
    left = order["bytes"]
    while left:
        piece = above.recv(min(left, order["piece"]), socket.MSG_WAITALL)
        if not piece:
            raise SystemExit("the parent has closed the connection")
        left -= len(piece)
        yield piece


# -- a star: every peer fetches from the hub over HTTP


def star_hub(settings: dict[str, Any]) -> None:
    """Serves ``bytes`` bytes at /."""
    from aiohttp import web

    payload = os.urandom(settings["bytes"])

    async def get(request: web.Request) -> web.Response:
        return web.Response(body=payload)

    async def started(app: web.Application) -> None:
        write_facts(ready=True)

    app = web.Application()
    app.router.add_get("/", get)
    app.on_startup.append(started)
    web.run_app(app, port=PORT, print=lambda *_: None, access_log=None)


def star(settings: dict[str, Any]) -> None:
    """Any order means: fetch ``url``."""
    import asyncio

    import aiohttp

    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as http:
            write_facts(ready=True)
            while await loop.run_in_executor(None, sys.stdin.readline):
                async with http.get(settings["url"]) as response:
                    async for _ in response.content.iter_any():
                        pass
                write_facts(done_s=time.time())

    asyncio.run(work())


# -- libtorrent


def torrent(settings: dict[str, Any]) -> None:
    """``peers``: addresses of all peers. The first order is ``{"seed": bytes}``, answered with the torrent file in hex;
    the other peers get ``{"torrent": hex}``. Then follows ``{"go": true}``.
    """
    lt: Any = importlib.import_module("libtorrent")
    session = lt.session(TORRENT_SETTINGS | {"listen_interfaces": f"0.0.0.0:{PORT}"})
    with tempfile.TemporaryDirectory(prefix="p2pcast-torrent-", dir=settings["folder"]) as name:
        write_facts(ready=lt.version)
        folder, number, handle = Path(name), 0, None
        for order in orders():
            if handle is not None and "go" not in order:
                session.remove_torrent(handle, lt.session.delete_files)
            if "seed" in order:
                number += 1
                (folder / f"payload-{number}").write_bytes(os.urandom(order["seed"]))
                files = lt.file_storage()
                lt.add_files(files, str(folder / f"payload-{number}"))
                made = lt.create_torrent(files, piece_size=TORRENT_PIECE_BYTES, flags=lt.create_torrent.v1_only)
                lt.set_piece_hashes(made, str(folder))
                document = lt.bencode(made.generate())
            elif "torrent" in order:
                document = bytes.fromhex(order["torrent"])
            if "go" not in order:
                add = lt.add_torrent_params()
                add.ti, add.save_path = lt.torrent_info(lt.bdecode(document)), str(folder)
                add.flags = lt.torrent_flags.upload_mode | (lt.torrent_flags.seed_mode if "seed" in order else 0)
                handle = session.add_torrent(add)
                if "torrent" in order:
                    _torrent_met(handle, settings["peers"])
                write_facts(torrent=document.hex() if "seed" in order else "")
                continue
            assert handle is not None
            handle.unset_flags(lt.torrent_flags.upload_mode)
            while not handle.status().is_seeding:
                time.sleep(TORRENT_POLL_S)
            write_facts(done_s=time.time())


def _torrent_met(handle: Any, others: list[str]) -> None:
    """Return when the torrent is connected to all others."""
    again_s = 0.0
    while handle.status().num_peers < len(others):
        if time.monotonic() >= again_s:
            met = {peer.ip[0] for peer in handle.get_peer_info()}
            for host in others:
                if host not in met:
                    handle.connect_peer((host, PORT))
            again_s = time.monotonic() + TORRENT_AGAIN_S
        time.sleep(TORRENT_POLL_S)


if __name__ == "__main__":
    main()
