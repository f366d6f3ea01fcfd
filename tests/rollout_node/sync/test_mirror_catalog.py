"""A catalog of a mirror in a real object store in a folder: signed artifacts, and objects that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from artifact_maker import KEY, LAYOUT, Made, Maker

from p2pcast.artifact import Assembly, RunKey, run_id
from p2pcast.artifact.artifact_file import Tail
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.mirror.object_names import READY, ReadyMarker, run_folder, tail_name
from p2pcast.mirror.object_store import ObjectMissingError, Objects
from rollout_node.sync.mirror_catalog import MirrorCatalog

RUN = run_id(KEY.public)
FIRST = Maker.make([3000] * 4, piece=1024, step=1)
SECOND = Maker.make([3000] * 4, piece=1024, step=2)


def assembled(made: Made) -> Assembly:
    assembly = Assembly(made.open, KEY.public, LAYOUT)
    for batch in made.batches:
        assembly.add_batch(batch)
    assembly.add_manifest(made.manifest)
    return assembly


def marker(made: Made) -> ReadyMarker:
    record = assembled(made).open
    return ReadyMarker(record.version, record.base, record.artifact)


@pytest.fixture
def objects(tmp_path) -> Objects:
    return Objects(tmp_path.as_uri(), run_folder(RUN))


@pytest.fixture
def catalog(objects) -> MirrorCatalog:
    return MirrorCatalog(objects, RUN, asyncio.Semaphore(4))


async def put(objects: Objects, made: Made) -> None:
    await objects.put(tail_name(made.id), Tail.of(assembled(made)).to_bytes())
    await objects.put(str(marker(made)), made.manifest)


async def no_check(tail: Tail, layout: Any) -> None: ...


async def test_a_listing_brings_signed_entries(objects, catalog):
    await put(objects, FIRST)
    assert await catalog.refresh(KEY.public) == (True, None)
    assert await catalog.refresh(KEY.public) == (False, None)
    entry = catalog.entries[FIRST.id]
    assert (entry.base, entry.version, entry.size) == (Version(0, 0), Version(0, 1), len(FIRST.log))
    await put(objects, SECOND)
    assert await catalog.refresh(KEY.public) == (True, None)
    assert list(catalog.edges()) == list(catalog.entries) == [FIRST.id, SECOND.id]
    assert catalog.take_complaints() == []


async def test_an_artifact_that_is_not_listed_any_more_is_dropped(objects, catalog):
    for made in (FIRST, SECOND):
        await put(objects, made)
    await catalog.refresh(KEY.public)
    await objects.remove([str(marker(FIRST))])
    assert await catalog.refresh(KEY.public) == (False, None)
    assert list(catalog.entries) == list(catalog.seen_at) == [SECOND.id]


async def test_an_avoided_artifact_is_no_edge_until_its_time_has_passed(objects, catalog):
    await put(objects, FIRST)
    await catalog.refresh(KEY.public)
    now = asyncio.get_running_loop().time()
    catalog.avoid(FIRST.id, now + 3600)
    assert catalog.edges() == {}
    assert catalog.is_avoided(FIRST.id, now)
    catalog.avoid(FIRST.id, now)
    assert list(catalog.edges()) == [FIRST.id]


@pytest.mark.parametrize(
    "contents",
    [b"", b"\x80", SECOND.manifest, FIRST.manifest[:-1], FIRST.manifest[:-1] + bytes([FIRST.manifest[-1] ^ 1])],
    ids=["empty", "no-record", "another-artifact", "cut-short", "wrong-signature"],
)
async def test_a_wrong_marker_is_no_entry_and_is_reported_once(objects, catalog, contents):
    await put(objects, SECOND)
    await objects.put(str(marker(FIRST)), contents)
    fresh, error = await catalog.refresh(KEY.public)
    assert fresh
    assert isinstance(error, IntegrityError)
    assert list(catalog.entries) == [SECOND.id]
    assert catalog.take_complaints() == [str(marker(FIRST))]
    assert catalog.take_complaints() == []


async def test_entries_of_another_key_or_run_are_refused(objects, catalog):
    await put(objects, FIRST)
    _, error = await catalog.refresh(RunKey(bytes(32)).public)
    assert isinstance(error, IntegrityError)
    other = MirrorCatalog(objects, bytes(len(RUN)), asyncio.Semaphore(4))
    _, error = await other.refresh(KEY.public)
    assert isinstance(error, IntegrityError)
    assert catalog.entries == other.entries == {}


async def test_objects_with_names_of_other_programs_are_ignored(objects, catalog):
    await objects.put(READY + "notes.txt", b"?")
    assert await catalog.refresh(KEY.public) == (False, None)
    assert catalog.take_complaints() == []


async def test_a_directory_is_verified_before_use(objects, catalog):
    await put(objects, FIRST)
    await catalog.refresh(KEY.public)
    verified = []

    async def verify(tail: Tail, layout: Any) -> None:
        verified.append((tail, layout))

    tail, layout = await catalog.directory(FIRST.id, KEY.public, {}, verify)
    assert verified == [(tail, layout)]
    assert layout.layout_id == LAYOUT.layout_id
    assert tail.manifest == FIRST.manifest
    assert tail.batches == FIRST.batches


def another_key(tail: Tail) -> Tail:
    return tail._replace(key=RunKey(bytes(32)).public)


def another_manifest(tail: Tail) -> Tail:
    return tail._replace(manifest=SECOND.manifest)


def another_layout(tail: Tail) -> Tail:
    return tail._replace(layout=tail.layout.replace(b"w", b"v", 1))


@pytest.mark.parametrize("changed", [another_key, another_manifest, another_layout])
async def test_a_directory_that_does_not_belong_to_its_entry_is_refused_and_reported(
    objects, catalog, changed: Callable[[Tail], Tail]
):
    await put(objects, FIRST)
    await catalog.refresh(KEY.public)
    await objects.put(tail_name(FIRST.id), changed(Tail.of(assembled(FIRST))).to_bytes())
    with pytest.raises(IntegrityError):
        await catalog.directory(FIRST.id, KEY.public, {}, no_check)
    assert catalog.take_complaints() == [tail_name(FIRST.id)]


async def test_a_directory_that_fails_verification_or_is_missing_is_reported(objects, catalog):
    await put(objects, FIRST)
    await catalog.refresh(KEY.public)

    async def refuse(tail: Tail, layout: Any) -> None:
        raise IntegrityError("a batch's signature is wrong")

    with pytest.raises(IntegrityError, match="batch's signature"):
        await catalog.directory(FIRST.id, KEY.public, {}, refuse)
    await objects.remove([tail_name(FIRST.id)])
    with pytest.raises(ObjectMissingError):
        await catalog.directory(FIRST.id, KEY.public, {}, no_check)
    assert catalog.take_complaints() == [tail_name(FIRST.id)]


async def test_reported_names_are_bounded(catalog):
    for number in range(limits.MAX_BAD_OBJECTS + 1):
        with pytest.raises(IntegrityError), catalog.blaming(f"object {number}"):
            raise IntegrityError("wrong")
    assert len(catalog.take_complaints()) == limits.MAX_BAD_OBJECTS
