"""``make guard``: a short form of every bar of speed and size, in turns with an earlier release's code, within the same
minutes (docs/reference/compatibility.md).
"""
