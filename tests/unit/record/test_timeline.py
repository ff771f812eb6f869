"""Spans of one process: what is recorded, what is joined, what is dropped, and that nothing else changes."""

import asyncio
import json
import resource
import signal
import time
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from torchtitan_rl.record import tracing
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.record.timeline import recording
from torchtitan_rl.record.timeline.span_file import SpanFile
from torchtitan_rl.record.timeline.spans import Spans
from torchtitan_rl.record.tracing import GARBAGE
from torchtitan_rl.tools.timeline.reading import Timeline


def spans_in(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()][1:]


@pytest.fixture
def spans(tmp_path):
    made = Spans(SpanFile(tmp_path / "spans.jsonl", {"process": "unit"}, every_s=60), 0)
    yield made
    made.file.shutdown()


def written(spans: Spans) -> list[dict]:
    spans.settle(all=True)
    spans.file.force_flush()
    return spans_in(spans.file.path)


def test_what_is_written_can_be_read_in_part(tmp_path):
    spans = Spans(SpanFile(tmp_path / "spans.jsonl", {"process": "controller", "pid": 1, "boot": "", "clock": 0}), 0)
    spans.end(spans.begin("step", 1))
    for start in (10, 20, 30):
        spans.leaf("work", "work", start, start + 5)
    spans.settle(all=True)
    spans.file.shutdown()

    def read(**kept):
        [controller] = Timeline.read(tmp_path, **kept).processes
        return [(piece.name, piece.start) for piece in controller.pieces]

    assert read() == [("step", 1), ("work", 10), ("work", 20), ("work", 30)]
    assert read(phases_only=True) == [("step", 1)]
    assert read(window=(16, 29)) == [("step", 1), ("work", 20)]


def test_a_programs_own_exporter_hears_every_span(tmp_path, monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    spans = Spans(SpanFile(tmp_path / "spans.jsonl", {}), 0)
    begun = spans.begin("step", 1)
    spans.leaf("encode", "work", 2, 3, attributes={"version": 7})
    spans.end(begun)
    leaf, step = exporter.get_finished_spans()
    assert (leaf.name, leaf.start_time, leaf.end_time, leaf.parent) == ("encode", 2, 3, step.context)
    encode = {"name": "encode", "kind": "work", "start": 2, "end": 3, "thread": "MainThread", "version": 7}
    assert written(spans)[0] == encode | {"id": leaf.context.span_id, "in": step.context.span_id}
    monkeypatch.undo()
    alone = Spans(SpanFile(tmp_path / "alone.jsonl", {}), 0)
    begun = alone.begin("step", 1)
    alone.leaf("encode", "work", 2, 3, attributes={"version": 7})
    alone.end(begun)
    leaf, step = written(alone)  # the same, without OpenTelemetry's part
    assert leaf == encode | {"id": 0, "in": step["id"]} and len(exporter.get_finished_spans()) == 2


def test_pieces_close_together_are_one_span_and_others_are_not(spans):
    ms = 1_000_000
    for start in (0, 1.1, 2.2, 10):  # gaps of 0.1 ms, then one of 6.8
        spans.piece("encode", int(start * ms), int((start + 1) * ms))
    found = written(spans)
    assert [(span["start"] / ms, span["end"] / ms, span.get("pieces")) for span in found] == [
        (0, 3.2, 3),
        (10, 11, None),
    ]
    assert {(span["name"], span["kind"]) for span in found} == {("encode", "work")}


def test_waits_that_overlap_are_one_span(spans):
    first, second = spans.wait_begins("wait for rewards", 5), spans.wait_begins("wait for rewards", 7)
    spans.wait_ends(first, 9)
    spans.wait_ends(second, 12)
    third = spans.wait_begins("wait for rewards", 20)
    spans.wait_ends(third, 21)
    assert [(span["start"], span["end"]) for span in written(spans)] == [(5, 12), (20, 21)]


def test_a_wait_that_goes_on_at_the_end_is_written_and_may_end_later(spans):
    key = spans.wait_begins("wait for rewards", spans.now())
    [found] = written(spans)
    assert found["name"] == "wait for rewards" and found["end"] > found["start"]
    spans.wait_ends(key, spans.now())
    assert written(spans) == [found]


@pytest.fixture
def recorded(spans):
    """What `tracing`'s functions are recorded into."""
    tracing.record_into(spans)
    yield spans
    tracing.record_into(None)


def test_what_is_not_recorded_is_left_alone():
    async def attempt():
        return "done"

    coroutine = attempt()
    assert tracing.running("play", coroutine) is coroutine
    coroutine.close()
    assert tracing.span("draw tasks") is tracing.span("wait for tea", version=1) is tracing.served("optim_step")
    with pytest.raises(KeyError), tracing.span("draw tasks"):
        raise KeyError("as without it")


def test_a_span_of_work_has_attributes_and_survives_an_error(recorded):
    with tracing.span("load weights", version=3), pytest.raises(KeyError):
        with tracing.span("copy"):
            raise KeyError("lost")
    inner, outer = written(recorded)
    assert (inner["name"], inner["kind"], outer["name"], outer["version"]) == ("copy", "work", "load weights", 3)
    assert outer["start"] <= inner["start"] <= inner["end"] <= outer["end"]


async def test_a_phase_is_around_what_its_task_does(recorded):
    async def batch(number):
        with tracing.span("play a batch", kind="phase"):
            await asyncio.sleep(0.001 * number)
            with tracing.span("encode", batch=number):
                pass

    await asyncio.gather(batch(1), batch(2))
    found = written(recorded)
    phases = {span["id"] for span in found if span["name"] == "play a batch" and span["kind"] == "phase"}
    assert len(phases) == 2 and {span["in"] for span in found if span["name"] == "encode"} == phases


async def test_a_wait_for_an_answer_begins_when_the_call_is_sent(recorded):
    with tracing.span("send policy.optim_step"):
        pass
    waiting = tracing.span("wait for policy.optim_step", ranks=2)
    time.sleep(0.005)  # the event loop is busy before a task can await
    with waiting:
        await asyncio.sleep(0.01)
    send, wait = sorted(written(recorded), key=lambda span: span["start"])
    assert (send["name"], send["kind"]) == ("send policy.optim_step", "work")
    assert (wait["name"], wait["kind"], wait["ranks"]) == ("wait for policy.optim_step", "wait", 2)
    assert wait["end"] - wait["start"] >= 14_000_000


async def test_waits_of_many_tasks_are_one_span_and_answers_of_calls_one_each(recorded):
    async def group():
        with tracing.span("wait for rewards"), tracing.span("wait for policy.forward", ranks=1):
            await asyncio.sleep(0.01)

    await asyncio.gather(*(group() for _ in range(3)))
    found = written(recorded)
    assert [span["pieces"] for span in found if span["name"] == "wait for rewards"] == [3]
    assert len([span for span in found if span["name"] == "wait for policy.forward"]) == 3


async def test_a_coroutine_runs_between_its_waits_and_keeps_what_it_gives_and_raises(recorded):
    async def attempt(fails):
        with tracing.span("wait for tea"):
            await asyncio.sleep(0.01)
        time.sleep(0.005)
        if fails:
            raise KeyError("lost")
        return "done"

    class Awaitable:
        def __await__(self):
            yield from asyncio.sleep(0).__await__()
            return "a user's"

    with pytest.raises(KeyError, match="lost"):
        await tracing.running("play", attempt(True))
    task = asyncio.ensure_future(tracing.running("play", attempt(False)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await tracing.running("wrap", Awaitable()) == "a user's"

    assert (await asyncio.gather(*(tracing.running("play", attempt(False)) for _ in range(3)))) == ["done"] * 3
    found = written(recorded)
    waited = [span for span in found if span["name"] == "wait for tea"]
    ran = [span for span in found if span["name"] == "play"]
    assert len(waited) == 3 and waited[-1]["pieces"] == 3  # alone, cancelled, three at once
    assert 15_000_000 <= sum(span["end"] - span["start"] for span in ran)
    assert all(span["kind"] == "work" for span in ran)


def test_what_serves_waits_between_requests(tmp_path):
    def names(serves):
        made = Spans(SpanFile(tmp_path / f"{serves}.jsonl", {"process": "unit"}, every_s=60), 0, serves=serves)
        tracing.record_into(made)
        try:
            for operation in ("forward", "optim_step"):
                with tracing.served(f"policy.{operation}"):
                    pass
        finally:
            tracing.record_into(None)
            made.file.shutdown()
        return [span["name"] for span in written(made)]

    assert names(True) == ["policy.forward", "wait for a request", "policy.optim_step"]
    assert names(False) == ["policy.forward", "policy.optim_step"]  # the controller of a local run


def test_spans_of_a_run_that_has_ended_are_left_out(recorded):
    waiting, key = tracing.span("wait for policy.forward", ranks=1), tracing.span("wait for rewards")
    with waiting, key:
        recorded.settle(all=True)
        recorded.file.shutdown()
        tracing.record_into(None)
    assert [span["name"] for span in spans_in(recorded.file.path)] == ["wait for rewards"]


def test_a_full_disk_costs_spans_and_not_the_run(tmp_path, caplog):
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    file = SpanFile(tmp_path / "full.jsonl", {"process": "unit"}, every_s=60)
    spans = Spans(file, 0)
    for _ in range(3):
        spans.leaf("step", "work", 1, 2)
        file.force_flush()
    assert caplog.text.count("cannot be written, the run goes on without") == 1
    (tmp_path / "full.jsonl").unlink()
    spans.leaf("step", "work", 3, 4)
    file.shutdown()
    header, span, dropped = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert (header, span["start"], dropped) == ({"process": "unit"}, 3, {"dropped": 3})


def test_a_disk_that_takes_half_of_the_lines_has_no_half_line(tmp_path):
    """The system writes what fits below the limit, and tells how much that was."""
    file = SpanFile(tmp_path / "spans.jsonl", {"process": "unit"}, every_s=60)
    spans = Spans(file, 0)
    spans.leaf("before", "work", 1, 2)
    file.force_flush()
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 50, limit[1]))
        spans.leaf("lost", "work", 3, 4)
        file.force_flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit), signal.signal(signal.SIGXFSZ, handler)
    spans.leaf("after", "work", 5, 6)
    file.shutdown()
    assert [span.get("name") for span in spans_in(file.path)] == ["before", "after", None]
    assert spans_in(file.path)[-1] == {"dropped": 1}


def test_own_spans_join_in_whatever_their_attributes_are_called(tmp_path):
    file = SpanFile(tmp_path / "spans.jsonl", {"process": "controller", "pid": 1, "boot": "", "clock": 0}, every_s=60)
    Spans(file, 0)
    theirs = {"name": "a.txt", "start": 5, "in": 2, "dropped": 3, "documents": (1, 2), "digest": b"\xff"}
    with trace.get_tracer("mine").start_as_current_span("rank documents", attributes=theirs) as span:
        pass
    file.shutdown()
    [controller] = Timeline.read(tmp_path).processes
    [piece] = controller.pieces
    assert (piece.name, piece.kind) == ("rank documents", "work")
    assert (piece.start, piece.end) == (span.start_time, span.end_time)
    told = {"attribute.name": "a.txt", "attribute.start": 5, "attribute.in": 2, "dropped": 3, "documents": [1, 2]}
    told = {key: str(value) for key, value in told.items()} | {"documents": "(1, 2)", "digest": "b'\\xff'"}
    assert piece.more == told and controller.dropped == 0


def test_a_name_that_is_no_utf8_is_written_with_its_escape(spans):
    """Of a user's own span, whose name may come from a generator's text."""
    spans.leaf("rank \ud800", "work", 1, 2)
    spans.leaf("rank", "work", 3, 4)
    assert [span["name"] for span in written(spans)] == ["rank \ud800", "rank"]


def test_a_slow_disk_costs_no_memory(tmp_path):
    file = SpanFile(tmp_path / "spans.jsonl", {}, room=10, every_s=60)
    spans = Spans(file, 0)
    for _ in range(25):
        spans.leaf("step", "work", 1, 2)
    assert len(file._waiting) == 10
    file.shutdown()
    assert spans_in(file.path)[-1] == {"dropped": 15}


def test_the_loops_spans_are_phases_and_steps_are_numbered(tmp_path):
    [phases] = recording.phases_of(tmp_path)
    assert recording.phases_of(tmp_path / "other") == []  # one run at a time
    recorder = Recorder([phases])
    with recorder.span("reinforcement", total=9, done=4) as phase:  # a resumed run
        for _ in range(2):
            with recorder.span("step"), recorder.span("generate"):
                pass
            recorder.advance(phase, 2)
    recorder.close()
    [file] = tmp_path.glob("controller.*.jsonl")
    spans = [span for span in spans_in(file) if span["name"] != GARBAGE]  # a collection may fall in between
    by_id = {span["id"]: span for span in spans}
    assert [span["step"] for span in spans if span["name"] == "step"] == [5, 7]
    assert {by_id[span["in"]]["name"] for span in spans if span["name"] == "generate"} == {"step"}
    assert all(span["kind"] == "phase" for span in spans)
    assert recording.TIMELINE not in __import__("os").environ


def test_a_process_with_the_number_of_an_earlier_one_has_a_file_of_its_own(tmp_path):
    """As after the restart of a container."""
    for _ in range(2):
        [phases] = recording.phases_of(tmp_path)
        recorder = Recorder([phases])
        with recorder.span("reinforcement", total=1):
            pass
        recorder.close()
    assert len(list(tmp_path.glob("controller.*.jsonl"))) == 2
    for file in tmp_path.glob("controller.*.jsonl"):
        assert len([span for span in spans_in(file) if span["name"] == "reinforcement"]) == 1


async def test_environments_run_on_the_loop_or_in_a_thread(recorded):
    from torchtitan_rl.rollout.episode import Episode
    from torchtitan_rl.tasks.env import Env, Step
    from torchtitan_rl.types import Task

    class Plain(Env):
        def reset(self):
            time.sleep(0.05)
            return "hello"

        def step(self, text):
            return Step(observation="", reward=1.0, done=True)

    class Waiting(Plain):
        async def reset(self):
            await asyncio.sleep(0.05)
            return "hello"

    for kind in (Plain, Waiting):
        assert await Episode(kind(), Task(id="a", prompt="b"), 5.0).reset() == "hello"
    found = written(recorded)
    threads = {span["thread"] for span in found if span["name"] == "run an environment"}
    assert threads == {"MainThread", "environment"}
    waits = [span["end"] - span["start"] for span in found if span["name"] == "wait for an environment"]
    assert len(waits) == 2 and min(waits) >= 9_000_000  # a busy machine begins to wait late


def slowly(task, completions):
    time.sleep(0.02)
    return [1.0 for _ in completions]


def test_a_reward_process_records_itself(tmp_path, monkeypatch):
    from torchtitan_rl.tasks import reward_process

    told = {"directory": str(tmp_path), "offset_ns": 0, "boot": recording._boot()}
    monkeypatch.setenv(recording.TIMELINE, json.dumps(told))
    process = reward_process.RewardProcess()
    process.load(slowly)
    began = time.perf_counter_ns()
    assert [process.call(None, ["a", "b"]), process.call(None, ["a"])] == [[1.0, 1.0], [1.0]]
    ended = time.perf_counter_ns()
    process.process.stdin.close()  # the end of the requests
    assert process.process.wait(20) == 0
    [file] = tmp_path.glob("reward.*.jsonl")
    found = [span for span in spans_in(file) if span["name"] != GARBAGE]
    first, wait, second = sorted(found, key=lambda span: span["start"])
    assert [first["name"], wait["name"], second["name"]] == ["compute rewards", "wait for a request", "compute rewards"]
    assert began < first["start"] and second["end"] < ended  # one clock for the processes of a host
    assert first["end"] - first["start"] >= 20_000_000
