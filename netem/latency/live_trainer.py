"""A trainer that publishes live tensors by orders: ``python -m netem.latency.live_trainer trainer SETTINGS``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.numpy import save_file

from netem.broadcast.json_lines import orders, write_facts
from netem.broadcast.weights import SparseWeights
from trainer_node import Publisher


def main() -> None:
    """Settings: ``hub``, ``token_file``, ``base``, ``state_bytes``. An order: ``step``, ``delta_bytes``, ``save`` (a
    folder for the weights), ``idle_s`` (pause before the version). The answer comes once the hub has stored it.
    """
    settings = json.loads(sys.argv[2])
    weights = SparseWeights(settings["state_bytes"], 0)
    weights()
    with Publisher(settings["hub"], token_file=settings["token_file"], base=settings["base"]) as publisher:
        write_facts(ready=True)
        for order in orders():
            weights.delta_bytes = order["delta_bytes"]
            state = weights()
            folder = Path(order["save"])
            folder.mkdir(parents=True)
            save_file(state, folder / "model.safetensors")
            live = {name: torch.from_numpy(words) for name, words in state.items()}
            time.sleep(order["idle_s"])
            began_s = time.time()
            publisher.publish(order["step"], live).wait_durable()
            write_facts(began_s=began_s)


if __name__ == "__main__":
    main()
