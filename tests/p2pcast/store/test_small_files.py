"""Small files match their hashes, or are not returned."""

from __future__ import annotations

import blake3
import pytest
from artifacts_at_hand import LAYOUT, again, assembled, made, put

from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version


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


def test_lost_small_files_are_an_error_where_all_are_needed(store):
    """An operator removed a damaged file, as its error says. Files that are replaced may be missing."""
    put(store, "delta", 1)
    files = store.all_files(Version(0, 1))
    assert files == store.small_files(Version(0, 1))
    (store.root / "files" / blake3.blake3(files["conf.json"]).hexdigest()).unlink()
    assert "conf.json" not in store.small_files(Version(0, 1))
    with pytest.raises(LocalError, match=r"has lost the small file 'conf\.json' of 0\.1: publish the next"):
        store.all_files(Version(0, 1))
    assert store.all_files(Version(0, 1), but={"conf.json"}).keys() == files.keys() - {"conf.json"}
