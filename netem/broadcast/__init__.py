"""How near a broadcast comes to what its links allow: p2pcast and rivals, each on an emulated network of its own in the same run."""
