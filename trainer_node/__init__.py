"""The trainer's side: the hub daemon, and ``Publisher`` for a training process.

``from trainer_node import Publisher`` loads torch. Importing only the package, or the hub, does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_node.sdk.publication_handle import Handle
    from trainer_node.sdk.publisher import Publisher

__all__ = ["Handle", "Publisher"]


def __getattr__(name: str) -> Any:
    if name == "Publisher":
        try:
            import torch  # noqa: F401
        except ModuleNotFoundError:
            raise ImportError("Publisher needs PyTorch: pip install 'p2pcast[trainer]'", name="torch") from None
        from trainer_node.sdk.publisher import Publisher

        return Publisher
    if name == "Handle":
        from trainer_node.sdk.publication_handle import Handle

        return Handle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
