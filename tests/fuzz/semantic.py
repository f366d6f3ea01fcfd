"""Insiders in a swarm of real processes: ``python tests/fuzz/semantic.py --count 200000 --seed 1``. Contents and order
of their messages come from the schema and the seed (``tests/fuzz/insiders``).

Exit code 1 if a process ended, logged an unexpected error, grew, or installed other bytes than the trainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

from insiders.campaign import Infiltrated, Outcome, infiltrate

from p2pcast.process import event_loop

MIB = 1 << 20


async def run(options: argparse.Namespace, folder: Path) -> int:
    outcome = Outcome()

    async def tell() -> None:
        while True:
            await asyncio.sleep(60)
            print(f"{outcome.tally['heard']} messages heard, {outcome.versions} versions", file=sys.stderr, flush=True)

    telling = asyncio.create_task(tell())
    try:
        async with Infiltrated(folder) as fleet:
            await infiltrate(fleet, options.count, options.seed, outcome)
    finally:
        telling.cancel()
    print(json.dumps(outcome.document, indent=1), flush=True)
    grown = [name for name, (before, after) in outcome.memory.items() if after - before > options.grow_mib * MIB]
    return 1 if outcome.wrong or outcome.unexpected or grown or outcome.tally["given up"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000, help="least number of messages that are heard")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random choices; drawn and shown by default")
    parser.add_argument(
        "--grow-mib", type=int, default=64, help="allowed memory growth of a process after the first fifth, in MiB"
    )
    options = parser.parse_args()
    options.seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="p2pcast-insiders-", dir="/dev/shm") as folder:
        return event_loop.run(run(options, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
