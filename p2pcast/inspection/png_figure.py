"""Figures as PNG files. matplotlib is imported only when a figure is drawn, and needs no display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.errors import LocalError

DPI = 80
"""Low resolution for small files: figures go into documents and messages."""


def require_matplotlib() -> None:
    """Raise LocalError if matplotlib is missing. Call before the work whose result is to be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise LocalError("figures need matplotlib, which is not installed: pip install 'p2pcast[lab]'") from None


def blank(rows: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    """(figure, axes[rows][columns]); sizes in inches. Raises LocalError if matplotlib is missing."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Any, file: Path) -> None:
    """Write the file atomically. Equal figures give equal bytes. Raises LocalError if the file can't be written."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    atomic_write(file, out.getvalue(), None)


def plain(text: str) -> str:
    """A name as literal text: ``$`` starts no formula, and unprintable characters are replaced."""
    return "".join(c if c.isprintable() else "�" for c in text).replace("$", r"\$")
