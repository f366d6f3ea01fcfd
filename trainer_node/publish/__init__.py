"""Turns a checkpoint folder, or the tensors of ranks, into a published version."""
