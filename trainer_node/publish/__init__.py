"""From a checkpoint folder, or from ranks, to a version that is on its way."""
