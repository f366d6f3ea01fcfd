"""Scenarios on emulated networks: ``p2pcast lab``. What a scenario file may say: docs/lab.md."""
