from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from p2pcast.ground.errors import LocalError
from tests.trainer_node.learning import run_events as events
from trainer_node.learning.monitoring.run_log import LOG_NAME, RunLog
from trainer_node.learning.monitoring.run_record import Event
from trainer_node.learning.monitoring.tensorboard_log import TensorBoardLog, scalars


def event_of(document: events.Document) -> Event:
    event = events.record_of([]).add(document)
    assert event is not None
    return event


def test_scalars_of_each_event_have_tags_of_their_own():
    step = scalars(event_of(events.step(3)))
    assert step["train/reward"] == events.step(3)["reward"]
    assert step["train/staleness_max"] == 3.0
    assert {"train/tokens_per_s", "train/bubble", "train/kl_sampler", "train/entropy"} <= set(step)
    assert scalars(event_of(events.publish(2)))["publish/density"] == 0.26
    assert scalars(event_of(events.evaluation(10)))["evaluation/digits/3"] == 63.0
    assert scalars(event_of(events.probe(2, "vllm-a", 2e-5))) == {
        "probe_kl/vllm-a": 2e-5,
        "probe_floor/vllm-a": 1e-6,
        "probe_alarm/vllm-a": 1.0,
    }
    assert scalars(event_of(events.checkpoint(2))) == {"checkpoint/bytes": 4.8e6, "checkpoint/seconds": 0.4}
    assert scalars(event_of(events.start())) == scalars(event_of(events.end(3))) == {}


def test_values_that_are_none_have_no_scalars():
    assert "publish/live_s" not in scalars(event_of(events.publish(2, live_s=None)))
    assert scalars(event_of({"event": "step", "step": 1})) == {}


def test_tensorboard_reads_the_surviving_lineage(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="pip install 'p2pcast[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "tensorboard"
    documents = events.resumed_run()
    resume = documents.index(events.start(20, branch=1))
    for part in (documents[:resume], documents[resume:]):  # two processes
        with RunLog(tmp_path / LOG_NAME) as log, TensorBoardLog(board) as watcher:
            log.watch(watcher.write)
            for document in part:
                log.write(document)
    assert len(list(board.glob("events.out.tfevents.*"))) == 2

    read: Any = EventAccumulator(str(board)).Reload()
    rewards = read.Scalars("train/reward")
    assert [each.step for each in rewards] == list(range(1, 41))
    assert [each.value for each in rewards] == pytest.approx([step.reward for step in log.record.steps], rel=1e-6)
    assert [each.wall_time for each in rewards] == [step.time for step in log.record.steps]
    assert [each.step for each in read.Scalars("publish/bytes")] == list(range(2, 41, 2))
    assert [each.value for each in read.Scalars("evaluation/digits/2")] == [64.0] * 4


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(LocalError, match=r"pip install 'p2pcast\[tensorboard\]'"):
        TensorBoardLog(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="pip install 'p2pcast[tensorboard]'")
    (tmp_path / "file").write_text("")
    with TensorBoardLog(tmp_path / "file") as watcher, pytest.raises(LocalError, match="cannot write"):
        watcher.write(event_of(events.start()))
