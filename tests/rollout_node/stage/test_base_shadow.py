from __future__ import annotations

from types import SimpleNamespace

import pytest
from staging_peer import LAYOUT, Peer, V

from p2pcast.ground.errors import IntegrityError


def base_folder(version):
    checkpoint = SimpleNamespace(folder="base", lent=None)
    return SimpleNamespace(
        checkpoint=checkpoint, layout=LAYOUT, digest=0, version_among=lambda whole: version, small_files=dict
    )


async def test_the_base_folder_is_the_first_version(monkeypatch):
    async with Peer(monkeypatch, base=base_folder(V[0])) as peer:
        await peer.staged(0)
        assert peer.node.named("add_layout") == [LAYOUT]


async def test_a_folder_that_is_no_version_of_the_run_ends_the_peer(monkeypatch):
    peer = Peer(monkeypatch, base=base_folder(None))
    with pytest.raises(IntegrityError, match="wrong base"):
        await peer.updater.run()
