"""Scenarios on emulated networks: ``p2pcast lab``. docs/guides/wan-experiments.md describes scenario files."""
