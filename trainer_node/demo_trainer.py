"""The demo's trainer, publishing as a trainer of its users would: ``python -m trainer_node.demo_trainer --hub HOST:PORT --token-file FILE …``.

It is ``p2pcast.demo.train`` with a ``Publisher``: what peers get comes from the live fp32 masters. The folders that it writes too are what the demo judges by.
"""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3ForCausalLM

from p2pcast.demo.train import Snapshot, parse, parser, train
from trainer_node import Publisher


def main() -> None:
    options = parser("python -m trainer_node.demo_trainer")
    options.add_argument("--hub", required=True, metavar="HOST:PORT")
    options.add_argument("--token-file", type=Path, required=True, metavar="FILE")
    chosen = parse(among=options)
    made: list[Publisher] = []

    def publish(step: int, model: Qwen3ForCausalLM) -> Snapshot:
        if not made:  # the hub is started once the base is there
            made.append(Publisher(chosen.hub, token_file=chosen.token_file, base=chosen.out / "base"))
        return made[0].publish(step, model.named_parameters())

    try:
        train(chosen, publish)
    finally:
        for publisher in made:
            publisher.close()


if __name__ == "__main__":
    main()
