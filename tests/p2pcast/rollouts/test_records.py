"""Jobs and results: round trips, unknown fields, caps and attacks on the decoder."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group, Job, job_of
from p2pcast.rollouts.record_form import WINDOW_BYTES
from p2pcast.rollouts.result import MAX_RESULT_BYTES, Result, Span, fault

GROUP = Group(
    id=bytes(16),
    size=4,
    purpose="train",
    task="sums",
    task_hash=bytes(32),
    prompt=b"12+30=",
    seed=(1 << 64) - 1,
    temperature=1.0,
    max_tokens=8,
    stop_token_ids=(2,),
)
HASH = bytes(range(32))


def result(**changes) -> Result:
    """Three tokens of a prompt, two sampled, one of the environment, two sampled by a newer version."""
    fields = {
        "job": bytes(16),
        "lease": bytes([1]) * 16,
        "task_hash": bytes(32),
        "token_ids": np.array([5, 6, 7, 1, 2, 9, 3, 4], "<u4"),
        "mask": np.array([0, 0, 0, 1, 1, 0, 1, 1], "u1"),
        "logprobs": np.array([0, 0, 0, -0.5, -1.5, 0, -0.25, -3], "<f4"),
        "spans": (Span(Version(0, 3), 3, 5, HASH, "keep"), Span(Version(0, 4), 6, 8, HASH, "keep")),
        "temperature": 1.0,
        "reward": 0.5,
        "stop": "end",
    }
    return Result(**{**fields, **changes})


def packed(body: dict) -> bytes:
    return zstandard.ZstdCompressor().compress(msgpack.packb(body))


def body_of(record) -> dict:
    return msgpack.unpackb(record.to_map())


@given(
    st.integers(0, 64).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, (1 << 32) - 1), min_size=n, max_size=n),
            st.lists(st.integers(0, 1), min_size=n, max_size=n),
            st.lists(st.floats(width=32), min_size=n, max_size=n),
        )
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.lists(st.tuples(st.text(max_size=64), st.text(max_size=256)), max_size=4).map(tuple),
)
def test_results_round_trip(tokens, reward, tags):
    ids, mask, logprobs = tokens
    made = result(
        token_ids=np.array(ids, "<u4"), mask=np.array(mask, "u1"), logprobs=np.array(logprobs, "<f4"), reward=reward,
        tags=tags,
    )  # fmt: skip
    read = Result.from_bytes(made.to_bytes())
    assert read == made
    assert read.digest() == made.digest()
    assert read.logprobs.tobytes() == made.logprobs.tobytes()
    assert not read.token_ids.flags.writeable


def test_a_job_is_its_group_and_an_index():
    jobs = [job_of(GROUP, index, bytes([index]) * 16, Version(0, 2)) for index in range(GROUP.size)]
    assert [Job.from_bytes(job.to_bytes()) for job in jobs] == jobs
    assert [job.sample_seed for job in jobs] == [(1 << 64) - 1, 0, 1, 2]
    assert jobs[1].prompt == GROUP.prompt
    with pytest.raises(RemoteError, match="not a job"):
        Job.from_bytes(GROUP.to_bytes())


@pytest.mark.parametrize("record", [GROUP, result()], ids=["group", "result"])
def test_unknown_fields_are_ignored_unless_critical(record):
    body = {**body_of(record), "colour": "red"}
    assert type(record).from_bytes(packed(body)) == record
    with pytest.raises(RemoteError, match="does not know the field 'colour'"):
        type(record).from_bytes(packed({**body, "critical": ["colour"]}))
    assert type(record).from_bytes(packed({**body, "critical": ["task_hash"]})) == record


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "its format is not 1"),
        ({"format": None}, "its format is not 1"),
        ({"kind": "job"}, "not a result"),
        ({"critical": "reward"}, "'critical' is malformed"),
        ({"reward": math.nan}, "'reward' is malformed"),
        ({"reward": True}, "'reward' is malformed"),
        ({"reward": "1"}, "'reward' is malformed"),
        ({"token_ids": b"abc"}, "'token_ids' is malformed"),
        ({"token_ids": [1, 2]}, "'token_ids' is malformed"),
        ({"spans": [[[0, 1], 0, 1, HASH]]}, "'spans' is malformed"),
        ({"spans": [[[0, 1], 0, 1, HASH, "none"]]}, "'spans' is malformed"),
        ({"stop": "crash"}, "'stop' is malformed"),
        ({"turns": None}, "'turns' is malformed"),
        ({"job": bytes(15)}, "'job' is malformed"),
    ],
)
def test_wrong_fields_are_named(changes, says):
    with pytest.raises(RemoteError, match=says):
        Result.from_bytes(packed({**body_of(result()), **changes}))


def test_a_missing_field_is_named():
    body = body_of(result())
    del body["lease"]
    with pytest.raises(RemoteError, match="'lease' is missing"):
        Result.from_bytes(packed(body))


def frame(data: bytes, **options) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, **options)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        result().to_map(),
        result().to_bytes()[:-3],
        result().to_bytes() + b"x",
        result().to_bytes() * 2,
        frame(result().to_map(), write_content_size=False),
        frame(bytes(MAX_RESULT_BYTES + 1)),
        packed([1]),
        zstandard.ZstdCompressor().compress(b"\xdd\xff\xff\xff\xff"),
        zstandard.ZstdCompressor().compress(b"\x91" * 100_000),
        zstandard.ZstdCompressor().compress(b"\xdf\xff\xff\xff\xff"),
        zstandard.ZstdCompressor().compress(b"\xc6\xff\xff\xff\xff"),
        packed({1: 2}),
    ],
)
def test_damaged_or_hostile_bytes_are_refused_within_little_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises(RemoteError):
            Result.from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 4 * limits.MIB
    finally:
        tracemalloc.stop()


def test_a_wide_window_is_refused():
    wide = frame(bytes(MAX_RESULT_BYTES), window_log=24)
    assert zstandard.get_frame_parameters(wide).window_size > WINDOW_BYTES
    with pytest.raises(RemoteError, match="window"):
        Result.from_bytes(wide)


def test_a_sound_result_has_no_fault():
    assert fault(result(), 10) is None
    assert result().sampled == 4
    assert result().oldest_step == 3


ONE = Span(Version(0, 3), 3, 5, HASH, "keep")
TWO = Span(Version(0, 4), 6, 8, HASH, "keep")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mask": np.ones(7, "u1")}, "8 token ids, 7 mask values"),
        ({"schedules": [(Version(9, 9), bytes(32))]}, "a schedule of a version that sampled no token"),
        ({"schedules": [(Version(0, 3), bytes(32)), (Version(0, 3), bytes(32))]}, "two schedules of one version"),
        ({"logprobs": np.zeros(9, "<f4")}, "9 log-probabilities"),
        ({"loss_mask": np.ones(7, "u1")}, "7 values of the loss mask"),
        ({"token_ids": np.array([5, 6, 7, 1, 2, 10, 3, 4], "<u4")}, "vocabulary of 10"),
        ({"mask": np.array([0, 0, 0, 1, 1, 2, 1, 1], "u1")}, "other than 0 and 1"),
        ({"mask": np.zeros(8, "u1")}, "no token was sampled"),
        ({"loss_mask": np.ones(8, "u1")}, "was not sampled"),
        ({"logprobs": np.array([0, 0, 0, -0.5, math.nan, 0, 0, 0], "<f4")}, "not finite"),
        ({"logprobs": np.array([0, 0, 0, -0.5, -math.inf, 0, 0, 0], "<f4")}, "not finite"),
        ({"logprobs": np.array([0, 0, 0, -0.5, 0.5, 0, 0, 0], "<f4")}, "above 0"),
        ({"logprobs": np.array([-1, 0, 0, -0.5, -0.5, 0, 0, 0], "<f4")}, "was not sampled"),
        ({"spans": ()}, "outside all spans"),
        ({"spans": (ONE,)}, "outside all spans"),
        ({"spans": (TWO, ONE)}, "out of order"),
        ({"spans": (ONE, ONE, TWO)}, "out of order"),
        ({"spans": (ONE, TWO._replace(end=9))}, "beyond the last token"),
        ({"spans": (ONE._replace(end=3), TWO)}, "empty"),
        ({"spans": (ONE._replace(start=2), TWO)}, "not sampled"),
        ({"spans": (ONE._replace(end=6), TWO)}, "not sampled"),
    ],
)
def test_faults_are_named(changes, says):
    found = fault(result(**changes), 10)
    assert found is not None
    assert says in found


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GROUP.size = 3
