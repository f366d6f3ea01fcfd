"""Small files match their hashes, or are not returned."""

from __future__ import annotations

import blake3
import pytest
from artifacts_at_hand import LAYOUT, again, assembled, made, put

from p2pcast.errors import IntegrityError
from p2pcast.version import Version


def test_damaged_small_file_is_not_returned(store):
    put(store, "delta", 1)
    name = blake3.blake3(store.small_files(Version(0, 1))["conf.json"]).hexdigest()
    (store.root / "files" / name).write_bytes(b"rot")
    with pytest.raises(IntegrityError, match=r"conf\.json.*damaged"):
        store.small_files(Version(0, 1))


def test_small_file_with_a_wrong_hash_is_not_stored(store):
    *signed, log = made("delta", 1)
    assembly = assembled(*signed)
    out = store.begin(assembly.open, LAYOUT)
    out.write(0, [bytes(len(log))])
    with pytest.raises(IntegrityError, match="does not match its hash"):
        store.seal(out, assembly)
    out.close()
    assert again(store).artifacts == {}
