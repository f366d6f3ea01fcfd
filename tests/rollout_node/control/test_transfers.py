from __future__ import annotations

from rollout_node.control.transfers import MEASURABLE_BYTES, Transfers


def test_the_last_transfer_is_taken_once():
    transfers = Transfers()
    assert transfers.take_last() is None
    transfers.received(1000, 0.5)
    transfers.received(2000, 0.25)
    assert transfers.take_last() == (2000, 250_000)
    assert transfers.take_last() is None


def test_the_fastest_transfer_that_is_long_enough_counts():
    transfers = Transfers()
    transfers.received(MEASURABLE_BYTES, 0.001)
    assert transfers.fastest_bps == 0.0
    transfers.received(2 * MEASURABLE_BYTES, 1.0)
    transfers.received(2 * MEASURABLE_BYTES, 2.0)
    assert transfers.fastest_bps == 16 * MEASURABLE_BYTES
