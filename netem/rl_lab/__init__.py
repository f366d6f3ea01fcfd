"""A whole RL run on an emulated WAN: its processes, and what is measured of them."""
