"""Links that work once, and the cookies for them."""

from __future__ import annotations

from p2pcast.page.reading_rights import COOKIE_S, LINK_S, MOST_COOKIES, MOST_LINKS, ReadingRights


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_link_gives_one_cookie() -> None:
    rights = ReadingRights()
    link = rights.new_link()
    cookie = rights.enter(link)
    assert cookie is not None
    assert rights.admits(cookie)
    assert rights.enter(link) is None


def test_neither_link_nor_other_text_reads() -> None:
    rights = ReadingRights()
    link = rights.new_link()
    assert not any(map(rights.admits, [link, "", "x", "\udcff"]))
    assert rights.enter("x") is None


def test_links_and_cookies_end() -> None:
    clock = Clock()
    rights = ReadingRights(clock)
    old, used = rights.new_link(), rights.new_link()
    cookie = rights.enter(used)
    assert cookie is not None
    clock.now += LINK_S
    assert rights.enter(old) is None
    assert rights.admits(cookie)
    clock.now += COOKIE_S
    assert not rights.admits(cookie)


def test_the_oldest_goes_first() -> None:
    rights = ReadingRights()
    links = [rights.new_link() for _ in range(MOST_LINKS + 1)]
    assert rights.enter(links[0]) is None
    first = rights.enter(links[1])
    assert first is not None
    for _ in range(MOST_COOKIES - 1):
        assert rights.enter(rights.new_link())
    assert rights.admits(first)
    rights.enter(rights.new_link())
    assert not rights.admits(first)
