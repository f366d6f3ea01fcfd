"""Calibration of sparse attention: acceptance rates of a model by budget and position, measured in a vLLM engine."""
