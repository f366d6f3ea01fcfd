"""Fuzz the decoders: ``python tests/fuzz/run.py [TARGET …] --seconds 60``. A failing input is written to ``--found``
and named, and the exit code is 1.

Compiled kernels run with numba's bounds checks. A target may take no more memory than it declares, and no input longer
than a minute. Inputs are random changes of the seeds and ``corpus/`` (``mutate``; ``--seed`` and ``--inputs`` repeat a
run). With ``--coverage``, atheris generates inputs and searches for new paths through the decoders' Python; it keeps
new inputs in ``--found``.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import os
import random
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

SPARE_BYTES = 1 << 30
"""Address space beyond the process's size after compilation."""
LONGEST_S = 60
"""Limit for one input; a noisy machine may pause for seconds."""
KERNELS = (
    "p2pcast.codec.kernels",
    "p2pcast.codec.gap_entropy_coder",
    "p2pcast.codec.step_entropy_coder",
    "p2pcast.codec.class_ranks",
    "p2pcast.codec.squash_cell",
)
"""Compiled modules: atheris cannot look inside, and must not change them."""


def main() -> int:
    options = _options()
    # Set before numba is loaded: code with bounds checks must not use a cache of code without them.
    os.environ["NUMBA_BOUNDSCHECK"] = "1"
    os.environ["NUMBA_CACHE_DIR"] = str(options.found / "numba")
    if options.coverage and len(options.targets) == 1:
        return _by_coverage(options)
    sys.path.append(str(Path(__file__).parents[2]))  # tests.fuzz
    from targets import TARGETS, WIDTHS

    WIDTHS[:] = options.widths
    for name in options.targets or TARGETS:
        if options.coverage:
            if subprocess.run([sys.executable, *sys.argv, name]).returncode:
                return 1
        else:
            _run(name, options)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="targets to run; all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each target in seconds")
    parser.add_argument("--inputs", type=int, default=1 << 62, help="largest number of inputs for each target")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8], help="bytes of the words in cells")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--found", type=Path, default=Path("fuzz-out"))
    return parser.parse_args()


def _run(name: str, options: argparse.Namespace) -> None:
    """Raises the errors of the target."""
    from mutate import mutated
    from targets import TARGETS, corpus

    target, kept = TARGETS[name], corpus(name)
    draw = random.Random(options.seed)
    tried, data = 0, b""
    try:
        for data in kept:
            target.check(data)  # compiles the kernels
        _limit_memory()
        tracemalloc.start()
        end = time.monotonic() + options.seconds
        while time.monotonic() < end and tried < options.inputs:
            data = mutated(draw.choice(kept), kept, draw)
            faulthandler.dump_traceback_later(LONGEST_S, exit=True)
            most = target.memory[0] + target.memory[1] * len(data)
            taken = _memory(target.check, data)
            if taken > most:  # the kernels for this input may have been compiled just now
                taken = _memory(target.check, data)
            assert taken <= most, f"{taken} bytes for an input of {len(data)}, more than {most}"
            tried += 1
    except BaseException:
        path = options.found / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
        options.found.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{name}: input {tried} fails, see {path}", file=sys.stderr)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    print(f"{name}: {tried} inputs from {len(kept)}", flush=True)


def _memory(check: Callable[[bytes], None], data: bytes) -> int:
    """Peak bytes that Python and numpy held."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    check(data)
    return tracemalloc.get_traced_memory()[1] - before


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _by_coverage(options: argparse.Namespace) -> int:
    """Runs one target; libFuzzer ends the process."""
    try:
        import atheris
    except ImportError:
        sys.exit("--coverage needs atheris: pip install -e '.[fuzz]'")

    (name,) = options.targets
    with atheris.instrument_imports(include=["p2pcast"], exclude=list(KERNELS), enable_loader_override=False):
        from targets import TARGETS, WIDTHS, corpus
    WIDTHS[:] = options.widths
    folder = options.found / name
    folder.mkdir(parents=True, exist_ok=True)
    for data in corpus(name):
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        TARGETS[name].check(data)
    limits = [
        f"-max_total_time={int(options.seconds)}",
        f"-timeout={LONGEST_S}",
        "-rss_limit_mb=3000",
        f"-artifact_prefix={folder}-",
    ]
    atheris.Setup([sys.argv[0], *limits, str(folder)], TARGETS[name].check)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
