"""The release number, named in errors and in state folders. pyproject.toml has the same
(tests/compat/test_release.py).
"""

RELEASE = "0.2.0.dev0"
