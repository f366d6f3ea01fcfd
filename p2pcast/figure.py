"""Figures as PNG files. matplotlib is asked for only where one is drawn, without a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from p2pcast.errors import LocalError
from p2pcast.store.files import atomic_write

DPI = 80
"""Small files: figures go into documents and messages."""


def require_matplotlib() -> None:
    """Raises LocalError where there is none: to be called before the work whose result is to be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise LocalError("a figure takes matplotlib, which is not installed: pip install 'p2pcast[lab]'") from None


def blank(rows: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    """(figure, axes[rows][columns]); inches. Raises LocalError."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Any, file: Path) -> None:
    """Write it whole, or raise LocalError. The same figure gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    atomic_write(file, out.getvalue(), None)


def plain(text: str) -> str:
    """A name as it is: ``$`` starts no formula, and what can't be printed is not."""
    return "".join(c if c.isprintable() else "�" for c in text).replace("$", r"\$")
