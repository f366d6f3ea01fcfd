"""How a peer reaches the newest version: its parent, pulls from peers, the mirror, and the path of artifacts."""
