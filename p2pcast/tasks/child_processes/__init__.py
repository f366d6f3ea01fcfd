"""Killable processes for tasks and hooks: both ends of their pipes."""
