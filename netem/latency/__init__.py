"""Time from a trainer's call, or a folder's rename, until small versions are live at every peer."""

PUBLISHER, FOLDER = "publisher", "folder"
SOURCES = (PUBLISHER, FOLDER)
"""Where versions come from: live tensors of a ``Publisher``, or folders that are renamed into place."""
