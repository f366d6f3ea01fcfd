"""The distinction between growth and noise."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from tests.chaos import process_stats
from tests.chaos.leak_check import FEWEST, trend

ALLOWED = 5.0


def series(value, seconds=60):
    return [(float(t), value(t)) for t in range(seconds)]


def test_too_few_readings_say_nothing():
    assert trend(series(float, FEWEST - 1), ALLOWED) is None
    assert trend(series(float, FEWEST), ALLOWED) is not None


def test_constant_series_is_flat():
    found = trend(series(lambda t: 100.0), ALLOWED)
    assert (found.level, found.growth, found.flat) == (100.0, 0.0, True)


def test_steady_growth_is_not_flat():
    found = trend(series(lambda t: 100.0 + t / 5), ALLOWED)
    assert found.growth == pytest.approx(59 / 5)
    assert not found.flat


def test_peaks_are_no_trend():
    draw = random.Random(1)
    found = trend(series(lambda t: 100.0 + (50.0 if draw.random() < 0.2 else draw.random())), ALLOWED)
    assert found.flat


def test_falling_series_is_flat():
    assert trend(series(lambda t: 100.0 - t), ALLOWED).flat


def test_a_share_of_a_high_level_is_noise():
    rise = series(lambda t: 1000.0 + t / 5)
    assert trend(rise, ALLOWED).flat
    assert not trend([(t, v - 900) for t, v in rise], ALLOWED).flat


METRICS = 'p2pcast_tasks 18.0\nother{engine="a b"} 3\np2pcast_duplicate_bytes_total 7.0\n'


def test_a_process_is_read():
    code = (
        "import socket, sys; s = socket.socket(); f = open('/dev/null'); b = b'x' * (32 << 20); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        reading = process_stats.read(process.pid, 7.0, METRICS)
        assert reading is not None
        assert reading.t_s == 7.0
        assert reading.tasks == 18
        assert reading.duplicate_bytes == 7
        assert reading.sockets == 1
        assert reading.descriptors == 5
        assert reading.anonymous_bytes > 32 << 20
        assert reading.pss_bytes > 32 << 20
        process.stdin.close()
        process.wait()
        assert process_stats.read(process.pid, 8.0, METRICS) is None
    own = process_stats.read(os.getpid(), 0.0, METRICS)
    assert own is not None
    assert own.cpu_s > 0
