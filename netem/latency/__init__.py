"""Time from a trainer's call, or a folder's rename, until small versions are live at every peer."""
