"""Virtual environments for frameworks that do not fit into the project's own: ``python tests/environments.py NAME``;
``make setup-NAME``. Prints the environment's interpreter.

An environment lies over the project's: it sees those packages, PyTorch and p2pcast among them, and holds what it needs
in other versions. Its folder is named by the hash of all that it was made from, is made once, and is complete when the
interpreter's path is printed. Two processes may ask at the same time.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "environments"
INSTALL_S = 1200.0
"""Time for one command of pip, in seconds."""
ENVIRONMENTS: dict[str, list[list[str]]] = {
    "trl": [["trl==1.16.0"]],
    # Trainers whose data alone is looked at. --no-deps leaves out what atropos's environments need.
    "bridges": [["tinker==0.38.0"], ["--no-deps", "atroposlib==0.4.0"]],
    # verifiers holds openai and mcp at older versions.
    "verifiers": [
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["verifiers"]
    ],
    # SGLang names one version of most of its dependencies, many of them for CUDA alone.
    "sglang": [
        ["--no-deps", "sglang==0.5.23"],
        [
            "openai==2.8.0",
            "openai-harmony==0.0.4",
            "xgrammar==0.2.7",
            "orjson",
            "python-multipart",
            "pillow",
            "setproctitle",
            "interegular",
            "partial_json_parser",
            "tiktoken",
            "llguidance",
            "einops",
            "watchfiles",
            "xxhash",
            "IPython",
            "sentencepiece",
            "pybase64",
            "distro",
            "gguf",
            "compressed-tensors==0.18.0",
            "mistral_common",
            "dill",
            "soundfile",
        ],
    ],
    # vLLM's CPU build breaks with the Triton that it depends on, except under Triton's interpreter.
    "triton": [["--no-deps", "triton==3.9.0"]],
    # verl holds transformers below 5.11. --no-deps leaves out wandb, which the tests do not use.
    "verl": [
        [
            "transformers>=5.5.3,!=5.6.0,<5.11",
            "ray[default]>=2.41,<3",
            "tensordict>=0.8,!=0.9.0,<=0.10.0",
            "hydra-core>=1.3,<2",
            "codetiming",
            "datasets",
            "dill",
            "peft",
            "pandas",
            "pyarrow>=19",
            "pybind11",
            "pylatexenc",
            "torchdata",
            "tensorboard",
            "uvicorn",
            "fastapi",
        ],
        ["--no-deps", "verl==0.9.1"],
    ],
}
"""By name: the arguments of each ``pip install``, in order."""


def python_of(name: str) -> Path:
    """The interpreter of an environment, which is made if it is not there. Raises CalledProcessError."""
    folder = FOLDER / f"{name}-{_stamp(name)}"
    python = folder / "bin" / "python"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            for old in FOLDER.glob(f"{name}-*"):
                shutil.rmtree(old)
            _run(sys.executable, "-m", "venv", folder)
            _lay_over(folder)
            for arguments in ENVIRONMENTS[name]:
                _run(python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments)
            (folder / "complete").touch()
    return python


def _lay_over(folder: Path) -> None:
    """Let an environment see the packages of this one, after its own."""
    below = sysconfig.get_path("purelib")
    above = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    (Path(above) / "packages-below.pth").write_text(f"import site; site.addsitedir({below!r})\n")


def _stamp(name: str) -> str:
    # Not those of sys.path, which differs between the processes of a test run.
    installed = metadata.distributions(path=[sysconfig.get_path("purelib")])
    below = sorted(f"{one.name}=={one.version}" for one in installed)
    made_from = [ENVIRONMENTS[name], below, sys.version, str(ROOT)]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=INSTALL_S, stdout=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environment of a framework; print its interpreter.")
    parser.add_argument("name", choices=sorted(ENVIRONMENTS))
    print(python_of(parser.parse_args().name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
