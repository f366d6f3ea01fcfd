"""Which HTTP connection gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pcast.daemon.connection_places import ConnectionPlaces

FLOOD, ADDRESS, OTHER = "192.0.2.1", "192.0.2.7", "192.0.2.8"


def full(most: int = 8, most_of_address: int = 8) -> ConnectionPlaces[str]:
    places: ConnectionPlaces[str] = ConnectionPlaces(most, most_of_address)
    for number in range(6):
        assert places.add(f"flood {number}", FLOOD) is None
    assert places.add("one", ADDRESS) is None
    assert places.add("two", ADDRESS) is None
    return places


def test_the_oldest_of_the_address_with_the_most_gives_way():
    places = full()
    assert [places.add(f"new {number}", OTHER) for number in range(3)] == ["flood 0", "flood 1", "flood 2"]
    assert len(places) == 8


def test_an_address_with_all_of_its_places_closes_its_own():
    places = full(most_of_address=6)
    assert places.add("flood 6", FLOOD) == "flood 0"
    places.remove("one")
    assert places.add("flood 7", FLOOD) == "flood 1"
    assert places.add("other", OTHER) is None


def test_addresses_of_one_ipv6_network_share_their_places():
    places: ConnectionPlaces[int] = ConnectionPlaces(8, 3)
    assert [places.add(number, f"2001:db8::{number}") for number in range(4)] == [None, None, None, 0]


def test_a_connection_with_a_new_request_gives_way_last():
    places = full()
    places.touch("flood 0")
    assert places.add("new", OTHER) == "flood 1"


def test_a_held_connection_keeps_its_place_until_its_answer():
    places = full()
    places.hold("flood 0", proven=True)
    places.hold("flood 1", proven=False)
    assert places.add("new 0", OTHER) == "flood 2"
    places.touch("flood 0")
    given_way = [places.add(f"more {number}", FLOOD) for number in range(4)]
    assert given_way == ["flood 3", "flood 4", "flood 5", "flood 0"]


def test_a_flood_of_requests_leaves_places_that_give_way():
    places: ConnectionPlaces[int] = ConnectionPlaces(16, 16)
    for number in range(16):
        places.add(number, FLOOD)
        places.hold(number, proven=False)
    assert places.add(16, FLOOD) == 8
    for number in range(9, 17):
        places.hold(number, proven=True)
    assert [places.add(number, ADDRESS) for number in range(17, 20)] == [15, 16, 17]


def test_one_address_holds_only_its_share():
    places: ConnectionPlaces[int] = ConnectionPlaces(100, 8)
    for number in range(8):
        places.add(number, FLOOD)
        places.hold(number, proven=True)
    assert places.add(8, FLOOD) == 7


@given(
    most=st.integers(1, 6),
    of_address=st.integers(1, 6),
    steps=st.lists(st.tuples(st.sampled_from(["add", "hold", "prove", "touch", "remove"]), st.integers(0, 9))),
)
def test_places_are_bounded_and_every_newcomer_gets_one(most, of_address, steps):
    places: ConnectionPlaces[int] = ConnectionPlaces(most, of_address)
    where: dict[int, int] = {}
    for number, (step, choice) in enumerate(steps):
        one = sorted(where)[choice % len(where)] if where else -1
        if step == "add":
            out = places.add(number, f"192.0.2.{choice % 3}")
            if out is not None:
                del where[out]
            where[number] = choice % 3
        elif step == "touch":
            places.touch(one)
        elif step == "remove":
            places.remove(one)
            where.pop(one, None)
        else:
            places.hold(one, proven=step == "prove")
        assert len(places) == len(where) <= most
        assert all(list(where.values()).count(address) <= of_address for address in range(3))
