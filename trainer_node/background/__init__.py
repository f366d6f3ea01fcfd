"""Background work beside the newest version: anchors, squashes, the mirror."""
