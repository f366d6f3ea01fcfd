"""Calibration of sparse attention: a model's acceptance rates by budget and position, measured in a vLLM engine."""
