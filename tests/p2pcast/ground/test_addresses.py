"""Addresses as people write them: accepted and refused forms, and the reasons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.addresses import (
    family_of,
    http_url,
    is_host,
    is_loopback,
    may_be_advertised,
    parse_address,
    plain_host,
    show_address,
    site_of,
    unscoped,
)
from p2pcast.ground.errors import UsageError


@pytest.mark.parametrize(
    ("text", "options", "parsed"),
    [
        ("hub.example:7077", {}, ("hub.example", 7077)),
        ("10.0.0.1:0", {}, ("10.0.0.1", 0)),
        ("[::1]:7077", {}, ("::1", 7077)),
        ("[2001:DB8:0::5]:1", {}, ("2001:db8::5", 1)),
        ("[::ffff:10.0.0.1]:1", {}, ("10.0.0.1", 1)),
        ("[fd00::1]", {"default_port": 7077}, ("fd00::1", 7077)),
        ("hub", {"default_port": 7077}, ("hub", 7077)),
        (":7077", {"default_host": ""}, ("", 7077)),
        ("7077", {"default_host": "127.0.0.1"}, ("127.0.0.1", 7077)),
    ],
)
def test_valid_addresses_are_parsed(text, options, parsed) -> None:
    assert parse_address(text, **options) == parsed


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        ("::1:7077", {}, "goes in brackets"),
        ("2001:db8::1", {"default_port": 7077}, "goes in brackets"),
        ("http://hub:7077", {}, "is a URL"),
        ("[fe80::1%eth0]:7077", {}, "has a scope"),
        ("[fe80::1]:7077", {}, "link-local"),
        ("[hub]:7077", {}, "not an IPv6 address"),
        ("[10.0.0.1]:7077", {}, "not an IPv6 address"),
        ("[::1]7077", {}, "goes in brackets"),
        ("[::1]", {}, "not an address"),
        ("[::1]:", {"default_port": 7077}, "not an address"),
        ("hub", {}, "not an address"),
        ("hub:65536", {}, "not an address"),
        ("hub:٣", {}, "not an address"),
        ("two words:1", {}, "not an address"),
        (":7077", {}, "not an address"),
        ("", {}, "not an address"),
    ],
)
def test_invalid_addresses_are_refused_with_a_reason(text, options, why) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        parse_address(text, **options)
    assert "\n" not in str(refused.value)


@given(st.ip_addresses().filter(lambda ip: ip.version == 4 or not ip.is_link_local), st.integers(0, 65535))
def test_shown_addresses_can_be_parsed(ip, port) -> None:
    assert parse_address(show_address(str(ip), port)) == (plain_host(str(ip)), port)


@given(st.text(max_size=40), st.sampled_from([None, "", "h"]), st.sampled_from([None, 7077]))
def test_any_text_is_an_address_or_refused(text, host, port) -> None:
    try:
        parsed = parse_address(text, default_host=host, default_port=port)
    except UsageError:
        return
    assert 0 <= parsed[1] <= 65535
    assert parsed[0] or host == ""


def test_hosts_are_classified() -> None:
    assert [family_of(h) for h in ("10.0.0.1", "::1", "hub")] == [4, 6, None]
    assert [is_loopback(h) for h in ("127.0.0.9", "::ffff:127.0.0.1", "::1", "10.0.0.1", "localhost")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert [may_be_advertised(h) for h in ("10.0.0.1", "fd00::1", "fe80::1", "0.0.0.0", "::", "hub")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert site_of("10.0.0.1") == "10.0.0.1"
    assert site_of("2001:db8::1") == site_of("2001:db8::2") != site_of("2001:db8:0:1::1")
    assert site_of("::1") == "::1"


@pytest.mark.parametrize(
    "host",
    [
        "",
        "10.0.0.1",
        "2001:db8::7",
        "fe80::1",
        "hub",
        "peer-1.example.org",
        "my_host.internal",
        "example.org.",
        "a" * 63,
        "1st.example",
    ],
)
def test_hosts_that_may_be_dialled(host) -> None:
    assert is_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "::1%" + "a" * 100,
        "fe80::1%eth0",
        "a" * 64,
        ".".join(["a" * 60] * 5),
        "a..b",
        ".",
        ".a",
        "-a",
        "a-",
        "a b",
        "a\0b",
        "a/b",
        "[::1]",
        "h:1",
        "\N{LATIN SMALL LETTER E WITH ACUTE}.example",
        "127.1",
        "2130706433",
        "0x7f000001",
        "10.0.0.256",
        "host.7",
    ],
)
def test_hosts_that_may_not(host) -> None:
    assert not is_host(host)


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "-a", "a b", "a\0b", "127.1", "[fe80::1%eth0]"])
def test_unreachable_hosts_are_refused_as_options(host) -> None:
    with pytest.raises(UsageError):
        parse_address(f"{host}:7077")


def test_addresses_are_announced_without_a_scope() -> None:
    assert unscoped("fe80::1%eth0") == "fe80::1"
    assert unscoped("10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    "text",
    ["", "host:1", "ftp://a", "http://", "//a", "http://a..b", f"http://{'a' * 64}:1", "http://[::g]", "http://a:99999",
     "http://a:x", "http://a b", "http://a\n", "http://a:0"],
)  # fmt: skip
def test_a_text_that_no_client_can_reach_is_no_url(text) -> None:
    with pytest.raises(UsageError, match=r"OPTION: .* is not a URL: write http://HOST:PORT"):
        http_url(text, "OPTION")


@pytest.mark.parametrize(
    "text", ["http://a", "https://a_b.c:1/v1/", "http://[::1]:8000", "http://127.1:1", "http://é.example"]
)
def test_a_url_loses_its_last_slash_alone(text) -> None:
    assert http_url(text, "OPTION") == text.removesuffix("/")
