"""The house rules on imports (docs/architecture.md): who may use whom, and what pure cores must not touch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"p2pcast", "topology", "trainer_node", "rollout_node", "netem"}
ALLOWED = {
    "topology": {"topology"},
    "p2pcast": {"p2pcast"},
    "trainer_node": {"trainer_node", "p2pcast", "topology"},
    "rollout_node": {"rollout_node", "p2pcast"},
    "netem": {"netem", "p2pcast", "topology", "trainer_node"},
}
IMPURE = {"aiohttp", "asyncio", "mmap", "random", "secrets", "socket", "ssl", "subprocess", "time", "torch", "uvloop"}
CORES = [
    "topology",
    "p2pcast/addresses.py",
    "p2pcast/codec",
    "p2pcast/wire",
    "p2pcast/trust/bearer.py",
    "p2pcast/trust/certificates.py",
    "p2pcast/trust/credentials.py",
    "p2pcast/trust/ledger.py",
    "p2pcast/trust/roles.py",
    "p2pcast/transport/striping.py",
    "p2pcast/relay/artifact.py",
    "p2pcast/relay/catchup.py",
    "p2pcast/relay/excerpt.py",
    "p2pcast/relay/feed.py",
    "p2pcast/relay/liveness.py",
    "p2pcast/relay/pieces.py",
    "p2pcast/relay/scattering.py",
    "p2pcast/relay/yielding.py",
    "p2pcast/relay/smoothing.py",
    "p2pcast/mirror/doubts.py",
    "p2pcast/mirror/names.py",
    "p2pcast/mirror/plan.py",
    "p2pcast/store/ladder.py",
    "p2pcast/store/retention.py",
    "p2pcast/artifact/assembly.py",
    "p2pcast/artifact/canonical.py",
    "p2pcast/artifact/packer.py",
    "p2pcast/artifact/records.py",
    "trainer_node/barrier.py",
    "trainer_node/engines.py",
    "trainer_node/membership.py",
    "trainer_node/peer.py",
    "trainer_node/spans.py",
    "trainer_node/intake.py",
]


def modules(place: str) -> Iterator[Path]:
    path = ROOT / place
    yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of all that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_one_way(package: str) -> None:
    found = list(modules(package))
    assert found
    for path in found:
        if not path.is_relative_to(ROOT / "p2pcast" / "cli"):
            assert not (imported(path) & OURS) - ALLOWED[package], path


@pytest.mark.parametrize("core", CORES)
def test_cores_are_pure(core: str) -> None:
    for path in modules(core):
        assert not imported(path) & IMPURE, path


def test_commands_are_imported_lazily() -> None:
    """Only inside functions may commands import the node packages: ``--help`` has to be quick."""
    for path in modules("p2pcast/cli"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in OURS - {"p2pcast"}, path
