"""Work in user-mode Linux: a real kernel is booted if this machine has one; otherwise the error names the missing
package.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from netem.emulation import backend, uml
from netem.emulation.guest import IO_URING, order
from p2pcast.ground.errors import LocalError, UsageError

HERE = "tests.netem.emulation.test_uml"
FEWEST = 550
"""Of a thousand packets with a loss of one third: seven standard errors below the mean."""
LACKING = "apt-get install user-mode-linux|no room for the registers"


@cache
def boots() -> bool:
    return shutil.which(uml.KERNEL) is not None and uml.runs_programs()


def kernel(folder: Path, text: str) -> None:
    """A program in the place of the kernel."""
    path = folder / uml.KERNEL
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_a_kernel_without_room_for_the_registers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kernel(tmp_path, f"echo 'userspace - {uml.REGISTERS}, errno = 14'; echo 'Kernel panic - not syncing'; exit 134")
    assert not uml.runs_programs()
    with pytest.raises(LocalError, match="no room for the registers of this processor"):
        list(uml.results(f"{HERE}:work", {}))
    kernel(tmp_path, "echo 'Kernel panic - not syncing: Attempted to kill init'; exit 134")
    assert uml.runs_programs()
    assert left() == []


def test_modules_follow_their_dependencies() -> None:
    known = "net/b-r.ko: net/stp.ko net/llc.ko\nnet/stp.ko: net/llc.ko\nnet/llc.ko:\nother.ko:\n"
    assert order(known, ("b_r", "other")) == ["net/llc.ko", "net/stp.ko", "net/b-r.ko", "other.ko"]
    with pytest.raises(KeyError):
        order(known, ("none",))


def work(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Inside the guest: two hosts, and a path of 60 ms that loses a third of its packets one way."""
    from netem.emulation.calibration import _round_trips, _sockets
    from netem.emulation.description import EmulatedLink, EmulatedNetwork, Host
    from netem.emulation.namespaces import namespaces

    yield {"pid": os.getpid(), "argument": argument, "interfaces": sorted(os.listdir("/sys/class/net"))}
    yield {"io_uring_disabled": IO_URING.read_text().strip() if IO_URING.exists() else "2"}
    try:
        Path(argument["outside"]).write_text("x")
    except OSError as error:
        yield {"refused": error.strerror}
    with namespaces(EmulatedNetwork((Host("a"), Host("b", EmulatedLink(50e6, 50e6, 0.03))))) as net:
        with _sockets(net, "a", "b") as (one, other):
            yield {"rtt_s": min(_round_trips(one, other, 0.06, 7))}
        net.reshape("b", EmulatedLink(delay_s=0.001, loss=0.33))
        with _sockets(net, "a", "b") as (one, _):
            before = net.received("b")
            for _ in range(1000):
                one.send(b"x")
            while net.received("b") - before < FEWEST:
                time.sleep(0.01)
            yield {"arrived": net.received("b") - before}


def wrong(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    raise UsageError("this can't be")


def broken(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from ()
    raise ZeroDivisionError("broken in the guest")


def left() -> list[str]:
    return [path.name for path in Path(tempfile.gettempdir()).glob(f"{uml.PREFIX}{os.getpid()}-*")]


def test_uml_network_has_delay_and_loss(tmp_path: Path) -> None:
    given = {"outside": str(Path(__file__).parent / "written-by-the-guest")}
    if not boots():
        with pytest.raises(LocalError, match=LACKING):
            list(backend.results("uml", f"{HERE}:work", given))
        return
    first, without, refused, delayed, lossy = backend.results("uml", f"{HERE}:work", given)
    assert first["pid"] == 1
    assert first["argument"] == given
    assert set(first["interfaces"]) <= {"lo", "dummy0", "sit0", "tunl0"}
    assert without == {"io_uring_disabled": "2"}
    assert refused == {"refused": "Read-only file system"}
    assert delayed["rtt_s"] > 0.055
    assert FEWEST <= lossy["arrived"] < 790
    assert left() == []


def test_guest_error_is_a_one_line_error() -> None:
    if not boots():
        with pytest.raises(LocalError, match=LACKING):
            list(uml.results(f"{HERE}:wrong", {}))
        return
    said = uml.results(f"{HERE}:wrong", {})
    assert next(said) == {"first": 1}
    with pytest.raises(UsageError, match="this can't be"):
        next(said)
    with pytest.raises(LocalError, match=r"ended early: .*ZeroDivisionError: broken in the guest"):
        list(uml.results(f"{HERE}:broken", {}))
    assert left() == []


WAITS = f"""
from netem.emulation.uml import results
for said in results("{HERE}:waits", {{}}):
    print("up", flush=True)
"""


def waits(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"up": True}
    signal.pause()


def test_killed_network_leaves_nothing() -> None:
    if not boots():
        with pytest.raises(LocalError, match=LACKING):
            list(uml.results(f"{HERE}:waits", {}))
        return
    maker = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True, cwd=uml.ROOT)
    try:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "up\n"
        ours = descendants(maker.pid)
        assert len(ours) >= 3
        watched = [os.pidfd_open(pid) for pid in ours]
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        for pidfd in watched:
            assert select.select([pidfd], [], [], 30.0)[0], "a process of the guest still runs"
            os.close(pidfd)
    finally:
        maker.kill()
        maker.communicate()
    folders = list(Path(tempfile.gettempdir()).glob(f"{uml.PREFIX}{maker.pid}-*"))
    assert len(folders) == 1
    with uml._folder():
        assert not folders[0].exists(), "the next boot removes the folder"


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def test_a_path_with_blanks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    with pytest.raises(UsageError, match="blanks"), uml._folder():
        pass


def test_the_backend_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    from netem.emulation.doctor import EmulationCheck

    names = ("root", "namespaces", "veth", "bridge", "tbf", "netem", "user-mode-linux")

    def having(*good: str) -> None:
        monkeypatch.setattr(backend, "probe", lambda: [EmulationCheck(name, name in good, "") for name in names])

    having(*names)
    assert backend.chosen() == "native"
    having("user-mode-linux")
    assert backend.chosen() == "uml"
    with pytest.raises(LocalError, match="native lacks root, namespaces, veth, bridge, tbf, netem"):
        backend.chosen("native")
    having()
    with pytest.raises(LocalError, match=r"native lacks .*uml lacks user-mode-linux.*apt-get install"):
        backend.chosen()
