"""Throughput of a p2pcast link over an emulated WAN, by its number of stripes: ``p2pcast bench stripes``."""
