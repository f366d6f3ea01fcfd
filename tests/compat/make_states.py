"""Makes the golden states with the previous release itself: ``python tests/compat/make_states.py [FOLDER]``. Takes
about a minute.

The run has a hub with a mirror and two peers, over loopback. It has eight versions with a branch, an anchor and a
squash. It has a token for a trainer, a revoked token, and the eviction of the second peer. FOLDER (default:
tests/compat/states/RELEASE) then holds hub.tar.xz, peer.tar.xz and mirror.tar.xz.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]  # history, previous; tests.support

from history import LIFETIME_DAYS, VERSIONS, state, step, write
from previous import FOLDER, RELEASE, Daemon, Releases, address_of, installed

from tests.support.until import wait_until

LEFT_OUT = ("daemon.json", "install.sock")
"""Of a daemon that runs; a stopped one has none of them."""


def status(folder: Path) -> dict[str, Any]:
    url = json.loads((folder / "daemon.json").read_text())["http"]
    with urllib.request.urlopen(f"{url}/status", timeout=5) as answer:
        document: dict[str, Any] = json.load(answer)
        return document


def there(folder: Path) -> bool:
    return (folder / "daemon.json").exists()


def made(releases: Releases) -> None:
    folder = releases.folder
    mirror = ("--mirror", f"file://{folder / 'mirror'}", "--certificate-days", LIFETIME_DAYS)
    hub = releases.hub(RELEASE, *mirror)
    address = address_of(hub)
    wait_until(lambda: there(folder / "hub"), "the hub answers")
    peers: list[Daemon] = [releases.peer(RELEASE, name, address) for name in ("peer", "thief")]
    for version in VERSIONS:
        write(folder / "checkpoints" / f"step_{step(version)}", state(version))
        wait_until(lambda version=version: status(folder / "hub")["version"] == version, f"{version} is published")
        for name in ("peer", "thief"):
            wait_until(
                lambda name=name, version=version: there(folder / name) and status(folder / name)["staged"] == version,
                version,
            )
    for words in (
        ("token", "create", "--role", "trainer", "--ttl", "never", "--uses", 3, "-o", folder / "trainer-token"),
        ("token", "create", "--ttl", "never", "-o", folder / "revoked-token"),
        ("evict", "thief", "--keep-token"),
    ):
        done = releases.run(RELEASE, *words, "--state", folder / "hub")
        assert done.returncode == 0, done.stderr
        if "revoked-token" in str(words[-1]):
            ident = done.stdout.split()[1]
            assert releases.run(RELEASE, "token", "revoke", ident, "--state", folder / "hub").returncode == 0
    assert peers[1].ended() == 3
    wait_until(
        lambda: (
            list((folder / "hub" / "deltas").glob("0.5-*"))
            and len(list((folder / "hub" / "deltas").glob("0.5-*"))) == 2
        ),
        "a squash",
    )
    wait_until(lambda: status(folder / "hub")["mirror"]["current"], "the mirror is current")
    assert peers[0].end() == 0
    assert hub.end() == 0
    (folder / "hub" / "token").write_text((folder / "token").read_text())


def packed(folder: Path, into: Path) -> None:
    """Sorted, without owners, times and what belongs to a process."""
    with tarfile.open(into, "w:xz", preset=9) as tar:
        for path in sorted(folder.rglob("*")):
            if path.name in LEFT_OUT:
                continue
            info = tar.gettarinfo(path, str(path.relative_to(folder)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            tar.addfile(info, io.BytesIO(path.read_bytes()) if info.isreg() else None)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "states" / RELEASE
    target.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="p2pcast-states-") as place,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shadows,
    ):
        folder = Path(place)
        releases = Releases(installed(folder), folder, Path(shadows))
        try:
            made(releases)
        finally:
            releases.end()
        for name in ("hub", "peer", "mirror"):
            packed(folder / name, target / f"{name}.tar.xz")
            print(f"{target / name}.tar.xz: {(target / f'{name}.tar.xz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
