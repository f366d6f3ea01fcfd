"""The release number, which appears in errors and state folders. pyproject.toml has the same number
(tests/compat/test_release.py).
"""

RELEASE = "0.2.0.dev0"
