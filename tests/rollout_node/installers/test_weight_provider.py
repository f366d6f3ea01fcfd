from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3
from recorder import Recorder

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.sparse.budget_schedule import FILE, MAX_FILE_BYTES
from rollout_node.installers.weight_provider import WeightProvider

ONE, TWO = Version(0, 1), Version(0, 2)


def provider(*, stored=None, manifest=None, base=None, small_file=None, hashes_of=None, **options):
    store, shadow = Recorder(), Recorder()
    shadow.files = lambda files: files
    store.answers = {"small_files": stored or {}, "manifest": manifest}
    store.answers |= {"small_file": small_file, "hashes_of": hashes_of or {}}
    return WeightProvider(store, base, shadow, **options), shadow


def base():
    made = Recorder()
    made.answers["small_files"] = {"config.json": b"base"}
    return made


def test_small_files_come_from_the_store():
    made, _ = provider(stored={"config.json": b"stored"}, base=base())
    assert made.small_files(ONE) == {"config.json": b"stored"}


def test_a_version_that_began_from_the_base_has_the_base_folders_files():
    assert provider(base=base())[0].small_files(ONE) == {"config.json": b"base"}


def test_a_version_without_small_files_gets_none_of_the_base():
    assert provider(manifest="a manifest", base=base())[0].small_files(ONE) == {}
    assert provider()[0].small_files(ONE) == {}


def test_a_schedule_comes_from_the_manifest_or_the_base():
    made, _ = provider(manifest="a manifest", base=base(), small_file=b"{}", hashes_of={ONE: b"h"})
    assert made.schedule(ONE) == b"{}"
    assert made.schedule_names() == {ONE: b"h"}
    folder = base()
    folder.answers["small_files"] = {FILE: b"{ }"}
    made, _ = provider(base=folder, hashes_of={TWO: b"h"})
    assert made.schedule_names() == {TWO: b"h"}
    assert made.schedule(ONE) == b"{ }"
    assert made.schedule_names() == {ONE: blake3(b"{ }").digest(), TWO: b"h"}
    made, _ = provider(manifest="a manifest", small_file=bytes(MAX_FILE_BYTES + 1))
    assert made.schedule(ONE) == b""


def test_layout_and_patches_come_from_the_shadow():
    made, shadow = provider()
    shadow.answers = {"layout_document": b"layout", "patches": [Path("a"), Path("b")]}
    assert made.layout_document() == b"layout"
    assert made.patches(ONE, TWO) == [Path("a"), Path("b")]
    assert shadow.named("patches") == [(ONE, TWO)]


def test_the_whole_shadow_is_given_only_while_held_still():
    given = []
    made, shadow = provider(before_dense=given.append)
    shadow.answers["patches"] = [Path("a")]
    made.patches(ONE, TWO)
    assert given == []
    shadow.answers["patches"] = Path("shadow")
    assert made.patches(None, TWO) == Path("shadow")
    assert given == [TWO]

    def refuse(version):
        raise RetryableError("it moves")

    made, shadow = provider(before_dense=refuse)
    shadow.answers["patches"] = Path("shadow")
    with pytest.raises(RetryableError, match="it moves"):
        made.patches(None, TWO)


def test_a_report_reaches_every_expectation():
    made, _ = provider()
    seen = []
    made.on_report += [lambda report: seen.append(("lead", report)), lambda report: seen.append(("member", report))]
    made.report({"rank": 1})
    assert seen == [("lead", {"rank": 1}), ("member", {"rank": 1})]
