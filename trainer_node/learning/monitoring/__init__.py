"""A learner for people: its log, the live screen, plots."""
