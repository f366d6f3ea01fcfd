"""vLLM's trainer side, by name: programs that speak its interface send their weights through p2pcast.

    from trainer_node.frameworks import vllm
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    vllm.register()
    engine = WeightTransferTrainerFactory.trainer_init(vllm.init_info(rank=rank, hub="hub:7077", token_file="token"),
                                                       client=client, source=source)
    engine.send_weights()

Written against the source of vLLM 0.33, not run: its CPU build ends at 0.32, which has no trainer side.
"""

from __future__ import annotations

from typing import Any

BACKEND = "p2pcast"


def register() -> None:
    """Register the trainer's engine under ``p2pcast``. May be repeated. Raises ImportError for vLLM before 0.33."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "trainer_node.frameworks.vllm_trainer", "P2PCastTrainerEngine"
        )


def init_info(**fields: Any) -> Any:
    """A ``P2PCastTrainerInitInfo``: ``rank``, and the arguments of ``GatheredWeights``."""
    from trainer_node.frameworks.vllm_trainer import P2PCastTrainerInitInfo

    return P2PCastTrainerInitInfo(**fields)
