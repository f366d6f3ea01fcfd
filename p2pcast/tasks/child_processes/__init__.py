"""Processes of tasks and hooks that can be killed: both ends of their pipes."""
