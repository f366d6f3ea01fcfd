"""Background work next to publishing: anchors, squashes, the mirror."""
