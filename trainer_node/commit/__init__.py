"""When engines switch to a version."""
