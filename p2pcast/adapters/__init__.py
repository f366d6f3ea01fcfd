"""Adapters: p2pcast as a way to move weights inside other RL frameworks, one package or module for each framework.

Importing this package loads nothing. Importing an adapter loads its framework, and no other package of this repository;
``Publisher`` is imported when an adapter publishes.
"""
