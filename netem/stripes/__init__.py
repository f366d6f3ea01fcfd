"""What one p2pcast link carries over an emulated WAN, by its number of stripes: ``p2pcast bench stripes``."""
