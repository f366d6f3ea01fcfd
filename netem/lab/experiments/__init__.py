"""What a scenario can run: a module each, with ``results(argument)``, which yields its calibration and then its rows (docs/lab.md)."""
