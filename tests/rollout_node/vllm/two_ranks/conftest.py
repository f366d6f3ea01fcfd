"""One vLLM server at tensor parallel 2 for all tests of this folder; its start takes longer than most of them.

Every test begins with the same version 0.0 in a run of its own, so that the peer writes the first version whole.
``../faults/sitecustomize.py`` makes faults in one worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import LONG, PROMPTS, TWO_RANKS, Server, loaded, make_model

sys.path.append(str(Path(__file__).parent))  # shared_engine

from shared_engine import Faults, Peer, Truth, advance

VERSIONS = 3
OPTIONS = ["--tensor-parallel-size", "2", "--enable-scale-out"]
"""The second option enables the route that takes and returns tokens."""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("server")
    (folder / "faults").mkdir()
    paths = [str(Path(__file__).parents[1] / "faults"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **TWO_RANKS,
        "P2PCAST_TEST_FAULTS": str(folder / "faults"),
        "PYTHONPATH": ":".join(filter(None, paths)),
    }
    with Server(make_model(folder / "model"), folder, *OPTIONS, environment=environment) as found:
        yield found


@pytest.fixture(scope="package", autouse=True)
def reference(tmp_path_factory: pytest.TempPathFactory, server: Server, read_versions: Any) -> Truth:
    """Answers to PROMPTS and LONG at 0.0, 0.1 and 0.2 from weights loaded by vLLM itself, before any install."""
    folders = read_versions(server.model, tmp_path_factory.mktemp("truth"), advance, VERSIONS)
    return loaded(server, folders, [*PROMPTS, LONG])


@pytest.fixture(scope="package")
def truth(reference: Truth) -> Truth:
    """Answers to PROMPTS alone, which differ between versions."""
    found = [texts[: len(PROMPTS)] for texts in reference]
    assert len({tuple(texts) for texts in found}) == VERSIONS
    return found


@pytest.fixture
def run(server: Server, make_run: Callable[..., Any], read_state: Callable[..., Any]) -> Any:
    return make_run(*read_state(server.model))


@pytest.fixture
def faults(server: Server) -> Iterator[Faults]:
    found = Faults(server.install.with_name("faults"))
    yield found
    for path in found.folder.iterdir():
        path.unlink()


@pytest.fixture
async def peer(server: Server, run: Any) -> AsyncIterator[Peer]:
    """A peer with 0.0 installed."""
    found = Peer(server, run)
    await found.start()
    await found.install()
    yield found
    await found.vanish()
