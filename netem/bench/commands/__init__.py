"""``p2pcast bench``: one module for each measurement."""
