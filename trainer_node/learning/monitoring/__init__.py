"""What a person sees of a learner: its log, the live screen, plots."""
