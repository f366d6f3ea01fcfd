"""``python -m netem.siege``."""

from __future__ import annotations

import json
import sys

from netem.siege.assault import Assault
from netem.siege.kinds import kinds
from netem.siege.orders import Orders
from p2pcast import event_loop


def main() -> None:
    orders = Orders.parse(sys.stdin.read())
    print(json.dumps(event_loop.run(Assault(orders, kinds(tls=orders.tls)).run())))


if __name__ == "__main__":
    main()
