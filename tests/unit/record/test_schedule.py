"""Schedules of engines: what is written is read back, and what came before a checkpoint is left out."""

from dataclasses import fields

import pytest
import torch

from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import (
    Companion,
    ScheduleEntry,
    ScheduleFile,
    UnderWay,
    company,
    digests,
    engine_files,
    read_schedule,
    request_key,
    schedule_of,
    since,
    since_load,
)
from torchtitan_rl.types import NEUTRAL, WITHOUT_ADAPTERS, Request, SamplingParams


def request(seed, number=1):
    return Request([1, 2], SamplingParams(max_tokens=4, seed=seed), number=number)


def test_commands_are_read_back_and_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    file = ScheduleFile(str(tmp_path), "generator-0")
    file.loaded(0, 0, 3, "00000001", ["norm"])
    file.admitted(0, 0, [request(7, number=1), request(8, number=2)])
    file.loaded(5, 2, 4, "00000002", ["norm"])
    file.close()
    with open(file.path, "a") as f:
        f.write('{"iteration": 6, "unfin')
    first, second, third = read_schedule(file.path)
    assert (first.iteration, first.version, first.weights, first.tensors) == (0, 3, "00000001", ["norm"])
    assert second.requests == [(1, request_key(request(7))), (2, request_key(request(8)))]
    assert (third.iteration, third.unfinished, third.tensors) == (5, 2, [])  # the names once
    assert second.version is None and 0 < first.at <= third.at


def test_requests_that_were_cancelled_are_read_back_and_kept_after_a_checkpoint(tmp_path):
    file = ScheduleFile(str(tmp_path), "generator-0")
    file.loaded(0, 0, 1, "00000001", ["norm"])
    file.admitted(0, 0, [request(7, 1), request(8, 2)])
    file.cancelled(3, 2, [2])
    file.close()
    entries = list(read_schedule(file.path))
    assert [(entry.iteration, entry.unfinished, entry.cancelled) for entry in entries][2:] == [(3, 2, [2])]
    assert entries[2].version is None and not entries[2].requests
    assert [entry.cancelled for entry in since(entries, 1)] == [[], [], [2]]


def test_slots_of_adapters_and_the_version_of_each_request_are_read_back(tmp_path):
    file = ScheduleFile(str(tmp_path), "generator-0")
    requests = [request(7, number=1), request(8, number=2), request(9, number=3)]
    for asked, version in zip(requests, (3, 3, WITHOUT_ADAPTERS)):
        asked.adapter = version
    file.loaded(0, 0, 3, "00000001", ["lora_a"], slot=1)
    file.admitted(0, 0, requests)
    file.close()
    first, second = entries = list(read_schedule(file.path))
    assert (first.slot, first.version, second.slot, second.adapters) == (1, 3, None, [3, 3, WITHOUT_ADAPTERS])
    load, admission = since(entries, 2)
    assert load.slot == 1 and admission.adapters == [WITHOUT_ADAPTERS] and admission.requests[0][0] == 3


@pytest.mark.parametrize("line", [b'{"steps": 1}', b"[1]", b"\xff\xfe", b'{"requests": 3}'])
def test_a_damaged_line_is_named(line, tmp_path):
    (tmp_path / "generator-0-1.jsonl").write_bytes(b'{"iteration": 0, "unfinished": 0}\n' + line + b"\n")
    with pytest.raises(
        ValueError, match=r"generator-0-1.jsonl, line 2: is no command of an engine .*put the file back"
    ):
        list(read_schedule(tmp_path / "generator-0-1.jsonl"))


def test_a_replacement_has_a_file_of_its_own(tmp_path):
    for role in ("generator-0", "generator-10", "generator-2", "generator-0"):
        ScheduleFile(str(tmp_path), role).close()
    names = [file.name for file in engine_files(tmp_path)]
    assert names == ["generator-0-1.jsonl", "generator-0-2.jsonl", "generator-2-1.jsonl", "generator-10-1.jsonl"]


def test_a_request_is_known_by_what_it_asks_and_not_by_its_number():
    assert request_key(request(7, number=1)) == request_key(request(7, number=9))
    assert request_key(request(7)) != request_key(request(8))
    assert request_key(Request([1, 2], None)) != request_key(Request([1, 2], None, top_k=1))


def test_the_names_of_requests_stay_as_records_have_them():
    params = SamplingParams(
        max_tokens=4, temperature=0.5, top_k=3, presence_penalty=0.25, seed=7, stop=["."], stop_token_ids=[5]
    )
    assert request_key(Request([1, 2], params)) == "9401bc525a18193b"
    assert request_key(Request([1, 2], None, top_k=2, cached=True)) == "9dc775c1d1e46718"


def test_every_setting_names_a_request():
    def key(**settings):
        return request_key(Request([1, 2], SamplingParams(max_tokens=4, **settings)))

    filters = {name: 0.5 for name in NEUTRAL}
    further = {
        "temperature": 0.5,
        "seed": 3,
        "stop": ["."],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "structure": "{}",
    }
    changed = {key(**{name: value}) for name, value in (filters | further).items()}
    assert len(changed | {key()}) == len(fields(SamplingParams))  # `max_tokens` has no default


def test_one_bit_of_a_tensor_changes_its_digest_and_no_other():
    tensors = {"b": torch.zeros(3), "a": torch.ones(2, 2, dtype=torch.bfloat16)}
    before = digests(tensors)
    tensors["b"].view(torch.int32)[1] ^= 1
    after = digests(tensors)
    assert len(before) == 16 and before[:8] == after[:8] and before[8:] != after[8:]


def test_what_came_before_a_checkpoint_is_left_out_but_for_the_last_load():
    entries = [
        ScheduleEntry(iteration=0, unfinished=0, version=3),
        ScheduleEntry(iteration=0, unfinished=0, requests=[(1, "a"), (2, "b")]),
        ScheduleEntry(iteration=9, unfinished=0, version=4),
        ScheduleEntry(iteration=9, unfinished=0, requests=[(3, "of an evaluation")]),
        ScheduleEntry(iteration=12, unfinished=0, requests=[(4, "c")]),
        ScheduleEntry(iteration=14, unfinished=1, requests=[(5, "d")]),
        ScheduleEntry(iteration=20, unfinished=0, version=5),
    ]
    kept = since(entries, 3)
    assert [(entry.iteration, entry.version, len(entry.requests)) for entry in kept] == [
        (0, 4, 0),
        (0, None, 1),
        (2, None, 1),
        (8, 5, 0),
    ]


def under_way(number, num_tokens, num_computed, temperature=1.0):
    return UnderWay(number=number, num_tokens=num_tokens, num_computed=num_computed, temperature=temperature)


FREE = under_way(0, 0, -1, None)


def entries_of(tmp_path, *requests):
    """The commands from a load on, at which requests were under way; number 2 and 4 have ended by the next one."""
    file = ScheduleFile(str(tmp_path), "generator-0")
    file.admitted(0, 0, [request(7)])
    file.loaded(5, 3, 4, "00000001", ["norm"], requests)
    file.ended(2, 30, 0)
    file.ended(4, 21, 16)
    file.admitted(9, 2, [request(8)])
    file.loaded(11, 3, 5, "00000002", [])
    file.close()
    return since_load(list(read_schedule(file.path)), 4)


def companion(number, num_tokens, num_computed, num_left, *, waits=False):
    return Companion(
        number=number, num_tokens=num_tokens, num_computed=num_computed, waits=waits, num_left=num_left, temperature=1.0
    )


def test_the_requests_under_way_at_a_load_are_read_back_as_a_company(tmp_path):
    entries = entries_of(tmp_path, under_way(2, 25, 24), FREE, under_way(3, 9, 8), under_way(4, 20, 0))
    assert [(entry.iteration, entry.version) for entry in entries] == [(0, 4), (4, None), (6, 5)]
    assert entries[0].temperature == 1.0 and entries[0].under_way == [[2, 25], [0, 0], [3, 9], [4, 20, 0]]
    free, long = companion(0, 0, -1, None), companion(3, 9, 8, None)
    assert company(entries) == [companion(2, 25, 24, 5), free, long, companion(4, 20, 16, 1, waits=True)]
    assert company(entries[1:]) == company([]) == []


def test_each_request_under_way_has_its_temperature(tmp_path):
    entries = entries_of(tmp_path, under_way(2, 25, 24, 0.0), FREE, under_way(3, 9, 8))
    assert entries[0].temperature == [0.0, None, 1.0]
    assert [companion.temperature for companion in company(entries)] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("request_under_way", "message"),
    [
        (under_way(3, 9, 8, None), "request 3 was scored, or drawn from an altered distribution"),
        (under_way(3, 9, -1), "request 3 waited for blocks of the cache, which generator.kv_cache_gib was too small"),
        (under_way(3, 9, 4), "request 3 had a part of its prompt computed"),
    ],
)
def test_what_nothing_can_take_the_place_of_is_named(tmp_path, request_under_way, message):
    with pytest.raises(ValueError, match=message):
        company(entries_of(tmp_path, under_way(2, 25, 24), request_under_way))


def test_an_engine_that_began_later_is_followed_whole_and_one_that_had_ended_not_at_all(tmp_path):
    entries = entries_of(tmp_path)
    assert since_load(entries, 3) == entries and since_load(entries, 6) == []


def test_a_schedule_that_has_changed_since_is_named(tmp_path):
    run_dir = RunDir.create(tmp_path)
    file = ScheduleFile(str(schedule_of(tmp_path, 1)), "generator-0")
    file.admitted(0, 0, [request(7)])
    run_dir.note_checksums()
    file.admitted(1, 1, [request(8)])
    file.close()
    assert run_dir.checksums.problems() == []  # it has grown
    file.path.write_bytes(b"[" + file.path.read_bytes()[1:])
    assert [problem.split(":")[0] for problem in run_dir.checksums.problems()] == [
        "schedule/attempt-1/generator-0-1.jsonl"
    ]
