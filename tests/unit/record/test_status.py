"""What a run says of its health: status.json and the table of events."""

import json
import logging
import os
import time

import pytest

from tests.kit.listener import EventLog
from torchtitan_rl.record.background import BackgroundListener
from torchtitan_rl.record.recorder import Listener, Recorder
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.status import Status, note_end, watched

logger = logging.getLogger("torchtitan_rl.dispatch.mesh_sampling_client")


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def status(run_dir):
    return json.loads((run_dir.path / "status.json").read_text())


def eventually(holds, seconds=5.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_lost_replica_is_an_event_and_changes_the_health(run_dir):
    recorder = Recorder([watched(run_dir, ["generator-0", "generator-1"])])
    assert status(run_dir)["replicas"] == {"generator-0": "starting", "generator-1": "starting"}
    with recorder.span("reinforcement", total=8) as phase:
        recorder.advance(phase, 3)
        with recorder.span("starting"):
            pass
        logger.warning("%s is lost", "it", extra={"event": "replica_lost", "who": "generator-1"})
        logging.getLogger("elsewhere").warning("of another package")
        with recorder.span("step"):
            eventually(lambda: status(run_dir)["replicas"]["generator-1"] == "it is lost")
            now = status(run_dir)
            assert now["replicas"]["generator-0"] == "healthy"
            assert (now["phase"], now["step"], now["num_steps"], now["ended"]) == ("reinforcement", 3, 8, "")
            assert [span["name"] for span in now["spans"]][0] == "reinforcement" and now["pid"] == os.getpid()
        logger.warning("replaced", extra={"event": "replica_replaced", "who": "generator-1"})
    recorder.close()
    logger.warning("after the end")
    now = status(run_dir)
    assert now["ended"] == "finished" and now["spans"] == [] and now["replicas"]["generator-1"] == "healthy"
    told = list(run_dir.tables["events"].read())
    assert [(e["step"], e["kind"], e["who"], e["text"]) for e in told] == [
        (3, "replica_lost", "generator-1", "it is lost"),
        (3, "replica_replaced", "generator-1", "replaced"),
    ]
    assert told[0]["level"] == "warning" and told[0]["at"][:4].isdecimal()


def test_a_run_that_fails_says_that_it_was_stopped(run_dir):
    recorder = Recorder([watched(run_dir, [])])
    with pytest.raises(KeyError), recorder.span("reinforcement", total=8):
        raise KeyError
    recorder.close()
    assert status(run_dir)["ended"] == "stopped"


def test_a_run_that_fails_after_its_last_span_was_stopped(run_dir):
    recorder = Recorder([watched(run_dir, [])])
    with recorder.span("evaluating"):
        pass
    note_end(recorder, "run_failed", "the checkpoint is not on disk")
    recorder.close()
    assert status(run_dir)["ended"] == "stopped"


def test_what_other_listeners_say_at_their_end_is_an_event(run_dir):
    class Late(Listener):
        def close(self):
            time.sleep(0.2)
            logger.warning("found", extra={"event": "finding", "who": "no_signal"})

    recorder = Recorder([BackgroundListener(Late(), name="late"), watched(run_dir, [])])
    recorder.close()
    assert [event["who"] for event in run_dir.tables["events"].read()] == ["no_signal"]
    assert status(run_dir)["ended"] == "finished"


def test_what_has_not_changed_is_written_again_after_a_while(run_dir, monkeypatch):
    listener = Status(run_dir, [])
    first = (run_dir.path / "status.json").stat().st_ino
    listener.beat()
    assert (run_dir.path / "status.json").stat().st_ino == first
    monkeypatch.setattr("torchtitan_rl.record.status.HEARTBEAT_S", 0.0)
    listener.beat()
    assert (run_dir.path / "status.json").stat().st_ino != first


def test_a_listener_in_a_thread_of_its_own_is_told_of_time_that_passes():
    beats = EventLog()
    aside = BackgroundListener(beats, name="beats", beat_s=0.01)
    eventually(lambda: beats.events.count(("beat",)) >= 2)
    aside.close()
