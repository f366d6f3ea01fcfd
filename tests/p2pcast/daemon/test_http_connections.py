"""The numbers of HTTP connections that follow from a process's descriptors."""

from __future__ import annotations

import pytest

from p2pcast.daemon.http_connections import HttpLimits


@pytest.mark.parametrize(
    ("limits", "descriptors", "most", "of_address"),
    [
        (HttpLimits(), 1024, 256, 256),
        (HttpLimits(), 1500, 375, 256),
        (HttpLimits(), 65_536, 1024, 512),
        (HttpLimits(), 8, 16, 16),
        (HttpLimits(share=0.5, most=8192), 1 << 31, 8192, 4096),
        (HttpLimits(of_address=1), 1024, 256, 1),
        (HttpLimits(of_address=9999), 1024, 256, 256),
    ],
)
def test_places_are_a_share_of_the_descriptors(limits, descriptors, most, of_address):
    places = limits.places(descriptors)
    assert (places.most, places.most_of_address) == (most, of_address)
