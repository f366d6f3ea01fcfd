"""Reports on the contents of a delta or of checkpoint folders (``p2pcast inspect``)."""
