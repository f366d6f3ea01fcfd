"""Emulated networks with rates alone, by this kernel: ``netem.emulation.namespaces`` and token buckets."""

from __future__ import annotations

from contextlib import AbstractContextManager

from netem.emulation.description import EmulatedNetwork
from netem.emulation.namespaces import Namespaces, namespaces
from p2pcast.ground.errors import UsageError


def rate_network(network: EmulatedNetwork) -> AbstractContextManager[Namespaces]:
    """The network, for the length of the block. From the main thread.

    Raises UsageError for delay or loss, which this backend lacks, and LocalError if the machine cannot make the
    network.
    """
    if not network.only_rates:
        raise UsageError(
            "the rate backend has neither delay nor loss: these need netem, in this kernel or in user-mode Linux"
        )
    return namespaces(network)
