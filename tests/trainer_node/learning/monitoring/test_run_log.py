from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from tests.trainer_node.learning import run_events as events
from trainer_node.learning.monitoring import run_log
from trainer_node.learning.monitoring.run_log import LOG_NAME, MAX_LINE_BYTES, RunLog, read_run
from trainer_node.learning.monitoring.run_record import Event, RunRecord, StartEvent, StepEvent

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
NUMBER = st.none() | st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.none() | st.integers(0, 2**53)


def write(path: Path, documents: list[events.Document]) -> RunRecord:
    with RunLog(path) as log:
        for document in documents:
            log.write(document)
        return log.record


# -- round trips


def test_every_event_is_read_as_written(tmp_path: Path):
    path = tmp_path / LOG_NAME
    documents = events.resumed_run()
    written = write(path, documents)
    assert [json.loads(line) for line in path.read_text().splitlines()] == documents
    assert read_run(path) == read_run(tmp_path) == written == events.record_of(documents)


def test_values_arrive_typed(tmp_path: Path):
    write(tmp_path / LOG_NAME, [events.start(), events.step(3), *events.stretch(10, 10), events.end(10)])
    record = read_run(tmp_path)
    assert record.starts == [StartEvent(0, 1.75e9, 0, 0, "sums-0.4M", 412_000, 1)]
    step = record.steps[0]
    assert (step.step, step.tokens, step.lr, step.batch) == (3, events.step(3)["tokens"], 3e-4, "00000003")
    assert step.staleness == {0: 100, 1: 120, 3: 36}
    assert step.staleness_max == 3
    assert step.staleness_mean == pytest.approx((120 + 3 * 36) / 256)
    assert step.tokens_per_s == pytest.approx(step.tokens / (step.wait_s + step.train_s))
    assert record.publications[0].version == Version(0, 10)
    assert record.evaluations[0].tags == {"digits": {"2": 64, "3": 63}}
    assert [probe.engine for probe in record.probes] == ["vllm-a", "vllm-b"]
    assert record.checkpoints[0].bytes == 4_800_000
    assert record.end is not None
    assert record.end.reason == "the ledger's last step"
    assert not record.unread


@given(
    step=st.integers(0, 2**40),
    numbers=st.fixed_dictionaries(dict.fromkeys(("reward", "loss", "kl_sampler", "bubble", "wait_s"), NUMBER)),
    counts=st.fixed_dictionaries(dict.fromkeys(("tokens", "groups", "truncated"), COUNT)),
    staleness=st.dictionaries(st.integers(0, 9999), st.integers(0, 2**40), max_size=5),
)
def test_any_step_survives_the_log(
    tmp_path_factory: pytest.TempPathFactory,
    step: int,
    numbers: dict[str, Any],
    counts: dict[str, Any],
    staleness: dict[int, int],
):
    path = tmp_path_factory.mktemp("run") / LOG_NAME
    write(path, [{"event": "step", "time": 1.0, "step": step, **numbers, **counts, "staleness": staleness}])
    assert read_run(path).steps == [StepEvent(step, 1.0, **numbers, **counts, staleness=staleness)]


@given(name=st.sampled_from(["start", "step", "publish", "evaluation", "probe", "checkpoint", "end"]), data=st.data())
def test_any_value_of_any_key_is_tolerated(name: str, data: st.DataObject):
    document = next(d for d in [*events.stretch(10, 10), events.start(), events.end(10)] if d["event"] == name)
    for key in data.draw(st.sets(st.sampled_from(sorted(set(document) - {"event"})), min_size=1)):
        document[key] = data.draw(JSON)
    record = RunRecord()
    event = record.add(document)
    assert record.unread == (event is None)
    if isinstance(event, StepEvent):
        assert all(math.isfinite(value) for value in (event.staleness_mean or 0.0, event.reward or 0.0))


@given(JSON)
def test_any_document_is_tolerated(document: Any):
    assert RunRecord().add(document) is None


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_a_line_is_strict_json(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]):
    path = tmp_path_factory.mktemp("run") / LOG_NAME
    write(path, [values | {"event": "step", "step": 1}])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    data = path.read_bytes()
    assert data.count(b"\n") == 1
    assert json.loads(data, parse_constant=refuse)["step"] == 1


def test_numbers_that_are_not_finite_become_null(tmp_path: Path):
    path = tmp_path / LOG_NAME
    wrong = {"loss": math.nan, "reward": math.inf, "grad_norm": -math.inf, "kl_sampler": np.float32("nan")}
    write(path, [events.step(1, **wrong, nested={"values": [math.nan, 1.5]})])
    line = json.loads(path.read_text())
    assert {line[key] for key in wrong} == {None}
    assert line["nested"] == {"values": [None, 1.5]}
    assert read_run(path).steps[0].loss is None


def test_scalars_of_arrays_are_numbers(tmp_path: Path):
    path = tmp_path / LOG_NAME
    write(path, [events.step(1, loss=np.float32(0.5), tokens=np.int64(7), reward=np.float64(0.25))])
    step = read_run(path).steps[0]
    assert (step.loss, step.tokens, step.reward) == (0.5, 7, 0.25)


def test_numbers_that_are_not_finite_in_another_writers_log_are_none(tmp_path: Path):
    path = tmp_path / LOG_NAME
    path.write_text('{"event": "step", "step": 1, "loss": NaN, "reward": 1e999, "tokens": ' + "9" * 400 + "}\n")
    assert read_run(path).steps == [StepEvent(1)]


def test_a_missing_time_is_filled_in(tmp_path: Path):
    with RunLog(tmp_path / LOG_NAME, clock=lambda: 12.5) as log:
        log.write({"event": "step", "step": 1})
        log.write({"event": "step", "step": 2, "time": 3.0})
    assert [step.time for step in read_run(tmp_path).steps] == [12.5, 3.0]


@pytest.mark.parametrize("document", [{"step": 1}, {"event": 3}, {"event": "step", "step": 1, "loss": object()}])
def test_a_document_that_is_no_event_is_refused_before_writing(tmp_path: Path, document: dict[str, Any]):
    with RunLog(tmp_path / LOG_NAME) as log:
        with pytest.raises(TypeError):
            log.write(document)
        with pytest.raises(ValueError, match="bytes"):
            log.write({"event": "start", "config": "x" * MAX_LINE_BYTES})
    assert (tmp_path / LOG_NAME).read_bytes() == b""


# -- unknown parts


def test_unknown_events_and_keys_are_ignored(tmp_path: Path):
    path = tmp_path / LOG_NAME
    with RunLog(path) as log:
        assert log.write({"event": "comet", "tail": [1, 2]}) is None
        log.write(events.start())
        assert log.write(events.step(1, colour="blue")) == events.record_of([events.step(1)]).steps[0]
    record = read_run(path)
    assert len(record.steps) == 1
    assert not record.unread


def test_lines_that_are_no_event_are_counted(tmp_path: Path):
    path = tmp_path / LOG_NAME
    lines = [json.dumps(events.start()), "garbage", "[1]", '{"event": "step"}', "{" * 3000, json.dumps(events.step(1))]
    path.write_bytes("\n".join(lines).encode() + b"\n\x00\xff\n")
    record = read_run(path)
    assert len(record.steps) == 1
    assert record.unread == 5


def test_control_characters_of_names_are_replaced(tmp_path: Path):
    record = events.record_of([events.probe(1, engine="a\x1b[31m\nb" + "c" * 1000)])
    assert record.probes[0].engine.startswith("a�[31m�bccc")
    assert len(record.probes[0].engine) == 300


# -- torn lines


def test_a_log_torn_at_any_byte_goes_on_after_its_last_whole_line(tmp_path: Path):
    path = tmp_path / LOG_NAME
    documents = [events.start(), events.step(1), events.publish(1)]
    write(path, documents)
    data = path.read_bytes()
    for offset in range(len(data) + 1):
        path.write_bytes(data[:offset])
        whole = data[:offset].count(b"\n")
        assert read_run(path) == events.record_of(documents[:whole]), offset
        with RunLog(path) as log:
            assert log.record == events.record_of(documents[:whole])
            log.write(events.checkpoint(1))
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert found == [*documents[:whole], events.checkpoint(1)], offset


def test_a_reader_beside_the_writer_sees_every_returned_write(tmp_path: Path):
    with RunLog(tmp_path / LOG_NAME) as log:
        for number in range(1, 5):
            log.write(events.step(number))
            assert len(read_run(tmp_path).steps) == number


def test_a_failed_write_leaves_the_log_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / LOG_NAME
    with RunLog(path) as log:
        log.write(events.start())
        before = path.read_bytes()
        inner = log._file

        class FullDisk:
            def write(self, data: bytes) -> int:
                if len(data) < 100:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return inner.write(data[:50])

            def truncate(self, size: int) -> int:
                return inner.truncate(size)

        monkeypatch.setattr(log, "_file", FullDisk())
        with pytest.raises(LocalError, match="no space is left"):
            log.write(events.step(1))
        monkeypatch.setattr(log, "_file", inner)
        assert path.read_bytes() == before
        assert not log.record.steps
        log.write(events.step(1))
    assert len(read_run(path).steps) == 1


# -- files that are no log


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b"hello\n",
        b"\x89PNG\r\n\x1a\n" + bytes(1000),
        b"{}\n",
        b'{"event": "comet"}\n',
        b"[[[[\n" * 10,
        b"{\n",
    ],
)
def test_a_file_that_is_no_log_is_refused_and_kept(tmp_path: Path, data: bytes):
    path = tmp_path / "notes.txt"
    path.write_bytes(data)
    with pytest.raises(LocalError, match=r"notes\.txt is no log of a run"):
        read_run(path)
    with pytest.raises(LocalError, match=r"notes\.txt is no log of a run"):
        RunLog(path)
    assert path.read_bytes() == data


def test_a_line_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_log, "MAX_LINE_BYTES", 2000)
    path = tmp_path / LOG_NAME
    path.write_text(json.dumps(events.start()) + "\n" + "x" * 3000)
    with pytest.raises(LocalError, match="no log of a run"):
        read_run(path)


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(LocalError, match=r"cannot read .*metrics\.jsonl: there is no such file"):
        read_run(tmp_path)
    with pytest.raises(LocalError, match="cannot write"):
        RunLog(tmp_path / "missing" / LOG_NAME)


def test_an_empty_log_is_a_run_without_events(tmp_path: Path):
    with RunLog(tmp_path / LOG_NAME):
        pass
    assert read_run(tmp_path) == RunRecord()


# -- resumed runs


def test_a_resume_supersedes_later_events(tmp_path: Path):
    write(tmp_path / LOG_NAME, events.resumed_run())
    record = read_run(tmp_path)
    assert [step.step for step in record.steps] == list(range(1, 41))
    assert [step.branch for step in record.steps] == [0] * 20 + [1] * 20
    assert [step.step for step in record.superseded_steps] == list(range(21, 28))
    assert [str(each.version) for each in record.publications[9:12]] == ["0.20", "1.22", "1.24"]
    assert [each.step for each in record.checkpoints] == [10, 20, 30, 40]
    assert [start.step for start in record.resumes] == [20]
    assert len(record.superseded) == 7 + 3 * 3  # versions 22, 24, 26, each with two probes


def test_a_resume_on_the_same_branch_supersedes_too():
    record = events.record_of([events.start(), *events.stretch(1, 5), events.start(3), events.step(4)])
    assert [step.step for step in record.steps] == [1, 2, 3, 4]


def test_a_resume_of_a_resume_keeps_each_lineage():
    first = [events.start(), *events.stretch(1, 6)]
    second = [events.start(4, 1), *events.stretch(5, 8, 1)]
    third = [events.start(2, 2), *events.stretch(3, 4, 2)]
    record = events.record_of([*first, *second, *third])
    assert [(step.branch, step.step) for step in record.steps] == [(0, 1), (0, 2), (2, 3), (2, 4)]
    assert [(step.branch, step.step) for step in record.superseded_steps] == [
        (0, 5), (0, 6), (0, 3), (0, 4), (1, 5), (1, 6), (1, 7), (1, 8),
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=6))
def test_steps_of_the_surviving_lineage_are_each_there_once(runs: list[tuple[int, int]]):
    """Each run resumes at a step that the run before had reached, and makes some steps."""
    documents: list[events.Document] = []
    at = 0
    for branch, (resumed, count) in enumerate(runs):
        at = min(at, resumed)
        documents += [events.start(at, branch), *(events.step(at + 1 + i, branch) for i in range(count))]
        at += count
    record = events.record_of(documents)
    assert [step.step for step in record.steps] == list(range(1, at + 1))
    assert len(record.steps) + len(record.superseded) == sum(count for _, count in runs)


def test_a_run_that_goes_on_after_its_end_has_not_ended():
    record = events.record_of([events.start(), events.step(1), events.end(1), events.start(1)])
    assert record.end is None
    assert not record.superseded


# -- watchers


def test_watchers_see_each_known_event_once_its_line_is_written(tmp_path: Path):
    seen: list[tuple[Event, int]] = []
    with RunLog(tmp_path / LOG_NAME) as log:
        log.watch(lambda event: seen.append((event, len(read_run(tmp_path).steps))))
        for document in (events.step(1), {"event": "comet"}, events.step(2)):
            log.write(document)
        assert seen == [(log.record.steps[0], 1), (log.record.steps[1], 2)]


def test_threads_write_whole_lines(tmp_path: Path):
    with RunLog(tmp_path / LOG_NAME) as log:
        threads = [
            threading.Thread(target=lambda i=i: [log.write(events.publish(100 * i + j)) for j in range(50)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_run(tmp_path) == log.record
    assert sorted(each.step for each in log.record.publications) == sorted(
        100 * i + j for i in range(4) for j in range(50)
    )
