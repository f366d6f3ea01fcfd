"""``make guard``: a short form of every bar of speed and size, run by turns with an earlier release's code in the same minutes (docs/compatibility.md)."""
