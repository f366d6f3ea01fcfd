"""Checks which roles a machine can take on, and gives the command line that fixes each problem (``p2pcast doctor``)."""
