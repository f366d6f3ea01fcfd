"""The experiments of scenarios: one module each, with ``results(argument)``, which yields the calibration and then the
rows (docs/guides/wan-experiments.md).
"""
