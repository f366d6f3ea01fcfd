"""Decides how much work each rollout worker gets, and how many workers a run needs."""
