"""The built wheel in an environment of its own: seed, join and the page work without torch or an engine."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

from built_wheel import PACKAGES, carry_a_version

WITHOUT = "import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, ['torch', 'vllm', 'transformers'])))"


def test_the_wheel_holds_the_program_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert not [name for name in names if "test" in name.rpartition("/")[2] and "/tests/" in name]
    assert {"p2pcast/page/static/index.html", "p2pcast/page/static/licences/uPlot.txt"} <= set(names)


def test_a_version_spreads_with_nothing_but_the_wheel(python: Path, tmp_path: Path) -> None:
    assert subprocess.run([str(python), "-c", WITHOUT], check=False).returncode == 0
    carry_a_version([python.with_name("p2pcast")], tmp_path)
