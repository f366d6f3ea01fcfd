"""Passes, publishing and installs on a GPU, in one command: ``make gpu``.

Steps are ordinary benchmarks and tests, each in a process of its own: one that fails costs no other. A step whose
packages are not installed is left out, and its row names them. Without a GPU all steps compute on CPU tensors.
"""
