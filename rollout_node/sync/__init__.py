"""How a peer gets to the newest version: parent, pulls from peers, mirror, and the path of artifacts."""
