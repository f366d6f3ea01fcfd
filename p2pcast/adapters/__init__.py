"""Adapters: one module for each training framework, which hands the framework's weights to a ``Publisher``.

Importing this package loads no framework, no torch and no trainer_node. Importing an adapter's module loads its
framework where a class of the framework has to be derived from. torch and trainer_node are loaded when they are used.
"""
