"""The experiments behind the scenarios. Each module has ``results(argument)``, which yields the calibration and then
the rows (docs/guides/wan-experiments.md).
"""
