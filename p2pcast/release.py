"""Which release this is: named in errors and in state folders. pyproject.toml says the same (tests/compat/test_release.py)."""

RELEASE = "0.2.0.dev0"
