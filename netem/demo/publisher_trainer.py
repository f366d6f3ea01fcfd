"""The demo's trainer with the ``Publisher`` that users would use: ``python -m netem.demo.publisher_trainer --hub
HOST:PORT --token-file FILE …``.

It runs ``netem.demo.train`` and publishes the live fp32 masters. The trainer's folders are written too; the demo
compares the peers' results with them.
"""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3ForCausalLM

from netem.demo.train import Snapshot, parse, parser, train
from trainer_node import Publisher


def main() -> None:
    options = parser("python -m netem.demo.publisher_trainer")
    options.add_argument("--hub", required=True, metavar="HOST:PORT")
    options.add_argument("--token-file", type=Path, required=True, metavar="FILE")
    chosen = parse(among=options)
    made: list[Publisher] = []

    def publish(step: int, model: Qwen3ForCausalLM) -> Snapshot:
        if not made:  # the hub starts when the base exists
            made.append(Publisher(chosen.hub, token_file=chosen.token_file, base=chosen.out / "base"))
        return made[0].publish(step, model.named_parameters())

    try:
        train(chosen, publish)
    finally:
        for publisher in made:
            publisher.close()


if __name__ == "__main__":
    main()
