"""``python -m netem.chaos.siege``."""

from __future__ import annotations

import json
import sys

from netem.chaos.siege.attack_table import kinds
from netem.chaos.siege.siege import Siege
from netem.chaos.siege.siege_settings import SiegeSettings
from p2pcast.process import event_loop


def main() -> None:
    settings = SiegeSettings.parse(sys.stdin.read())
    print(json.dumps(event_loop.run(Siege(settings, kinds(tls=settings.tls)).run())))


if __name__ == "__main__":
    main()
