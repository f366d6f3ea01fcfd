"""Emulated networks with rates alone, by this kernel: ``netem.namespaces`` and token buckets."""

from __future__ import annotations

from contextlib import AbstractContextManager

from netem.description import Network
from netem.namespaces import Namespaces, namespaces
from p2pcast.errors import UsageError


def rate_network(network: Network) -> AbstractContextManager[Namespaces]:
    """The network, for as long as the block runs. From the main thread.

    Raises UsageError for what this backend has not (delay, loss), LocalError when the machine will not.
    """
    if not network.only_rates:
        raise UsageError("the rate backend has neither delay nor loss: that takes netem, by this kernel or by user-mode Linux")
    return namespaces(network)
