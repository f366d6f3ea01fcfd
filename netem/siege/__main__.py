"""``python -m netem.siege``."""

from __future__ import annotations

import json
import sys

import uvloop

from netem.siege.assault import Assault
from netem.siege.kinds import kinds
from netem.siege.orders import Orders


def main() -> None:
    orders = Orders.parse(sys.stdin.read())
    print(json.dumps(uvloop.run(Assault(orders, kinds(tls=orders.tls)).run())))


if __name__ == "__main__":
    main()
