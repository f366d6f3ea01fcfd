"""A run's copy in an object store: object names, the plan of uploads and removals, suspect objects, and the store's
client (docs/guides/mirror.md).
"""
