"""Records of rollouts: what people and viewers read about a step."""

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from torchtitan_rl.record.recorder import RolloutsEnded, TrainedOn
from torchtitan_rl.record.records import evaluation_record, rollout_records
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.run_dir_writer import RunDirWriter
from torchtitan_rl.record.schemas import SCHEMAS
from torchtitan_rl.types import Completion, Datum, Rollout, RolloutGroup, Task, Turn


def turn(prompt, tokens, versions, why, **fields):
    completion = Completion(
        tokens=tokens, logprobs=[-1.0] * len(tokens), policy_versions=versions, finish_reason=why
    )  # fmt: skip
    return Turn(prompt_tokens=prompt, completion=completion, **fields)


def rollout(id, *turns, **fields):
    task = Task(id="sort/train/17", prompt="cab=", answer=["abc"])
    return Rollout(id=id, task=task, turns=list(turns), group="7/0", **fields)


def decode(tokens):
    return "".join(chr(96 + token) for token in tokens)


PLAYED = rollout(
    "7/0/0",
    turn([1, 2], [4, 5], [2, 3], "stop", seconds=(0.0, 0.5, 0.75)),
    turn([1, 2, 4, 5, 6], [7], [4], "length"),
    reward=1.0,
    reward_parts={"exact": 1.0, "format": -0.5},
    text="de f",
    seconds={"play": 0.5},
)
GROUP = RolloutGroup(id="7/0", rollouts=[PLAYED, rollout("7/0/1")], advantages=[0.5, -0.5])
DATUM = Datum(
    tokens=torch.tensor([1, 2, 4, 5, 6]),
    target_tokens=torch.tensor([2, 4, 5, 6, 7]),
    loss_inputs={
        "token_weights": torch.tensor([0.0, 0.25, 0.25, 0.0, 0.5]),
        "loss_mask": torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
        "advantages": torch.tensor([0.0, 0.5, 0.5, 0.0, 0.5]),
    },
    rollout=0,
    turns=[(0, 1, 2), (1, 4, 1)],
)
LOGPROBS = torch.tensor([-2.0, -1.0, -1.5, -3.0, -0.5])


def test_a_record_has_texts_turns_and_both_sides_of_the_training(tmp_path):
    run_dir = RunDir.create(tmp_path)
    writer = RunDirWriter(run_dir, decode)
    writer.trained(TrainedOn(sequences=[(DATUM, LOGPROBS)]))
    writer.rollouts(RolloutsEnded(step=7, groups=[GROUP]))
    first, second = run_dir.tables["rollouts"].read()
    turns, (sequence,) = first.pop("turns"), first.pop("sequences")
    assert first == {
        "step": 7,
        "attempt": 1,
        "phase": "reinforcement",
        "group_id": "7/0",
        "rollout_id": "7/0/0",
        "draw": "7/0",
        "role": "policy",
        "task_id": "sort/train/17",
        "prompt": "cab=",
        "answer": '["abc"]',
        "text": "de f",
        "reward": 1.0,
        "reward_parts": {"exact": 1.0, "format": -0.5},
        "advantage": 0.5,
        "left_out": "",
        "num_tokens": [2, 1],
        "finish_reason": "length",
        "end_reason": "",
        "policy_version_min": 2,
        "policy_version_max": 4,
        "seconds": {"play": 0.5},
        "turn_seconds": [[0.0, 0.5, 0.75], None],
        "masked": False,
    }
    assert [(t["prompt"], t["text"], t["num_prompt_tokens"]) for t in turns] == [("ab", "de", 2), ("f", "g", 5)]
    assert [t["extends"] for t in turns] == [None, 0]
    assert (turns[0]["tokens"], turns[0]["policy_versions"], turns[0]["logprobs"]) == ([4, 5], [2, 3], [-1.0, -1.0])
    assert sequence["policy_logprobs"] == LOGPROBS.tolist() and sequence["loss_mask"] == [0, 1, 1, 0, 1]
    assert sequence["target_tokens"] == [2, 4, 5, 6, 7] and sequence["token_weights"] == [0, 0.25, 0.25, 0, 0.5]
    assert sequence["turns"] == [[0, 1, 2], [1, 4, 1]] and sequence["old_logprobs"] is None
    assert (second["advantage"], second["turns"], second["sequences"]) == (-0.5, [], [])


def test_an_answer_that_json_lacks_is_recorded_as_python_writes_it():
    itself = []
    itself.append(itself)
    answers = {"{(0, 1): 'x'}": {(0, 1): "x"}, '{"0": [1]}': {0: [1]}, '"{1}"': {1}, "[[...]]": itself}
    for text, answer in answers.items():
        task = Task(id="t", prompt="", answer=answer)
        assert evaluation_record(task, None, correct=False, failed="it raised")["answer"] == text


def test_a_branch_is_recorded_from_the_turn_that_it_goes_on_from():
    root, branch = turn([1], [2], [0], "stop"), turn([1, 2, 5], [6], [0], "stop")
    played = rollout("0/0/0", root, turn([1, 2, 3], [4], [0], "stop"), branch, turn([7], [8], [0], "stop"))
    (record,) = rollout_records([RolloutGroup(id="0/0", rollouts=[played])], [], decode)
    assert [(t["extends"], t["prompt"]) for t in record["turns"]] == [(None, "a"), (0, "c"), (0, "e"), (None, "g")]


def test_without_a_decoder_a_record_has_no_tokens():
    records = list(rollout_records([GROUP], [(DATUM, LOGPROBS)], None))
    assert not {"turns", "sequences"} & records[0].keys() and records[0]["num_tokens"] == [2, 1]


def test_sequences_go_to_the_rollout_that_they_are_of():
    groups = [GROUP, RolloutGroup(id="8/0", rollouts=[rollout("8/0/0")], left_out="zero_variance")]
    records = list(rollout_records(groups, [(DATUM, LOGPROBS), (DATUM, LOGPROBS)], decode))
    assert [len(record["sequences"]) for record in records] == [2, 0, 0] and records[2]["left_out"] == "zero_variance"


def test_data_with_several_targets_a_token_are_recorded_without_what_is_per_target():
    targets = torch.stack([DATUM.target_tokens] * 3, dim=1)
    datum = Datum(
        tokens=DATUM.tokens, target_tokens=targets, loss_inputs={"loss_mask": torch.ones(5), "token_weights": targets}
    )
    (sequence,) = next(rollout_records([GROUP], [(datum, targets.float())], decode))["sequences"]
    assert sequence["target_tokens"] is None and sequence["policy_logprobs"] is None
    assert sequence["tokens"] == DATUM.tokens.tolist() and not {"advantages", "token_weights"} & sequence.keys()


def test_what_other_roles_say_of_a_token_is_recorded_where_a_run_has_it(tmp_path):
    inputs = DATUM.loss_inputs | {"old_logprobs": LOGPROBS, "reference_logprobs": LOGPROBS - 1, "values": LOGPROBS + 1}
    datum = Datum(tokens=DATUM.tokens, target_tokens=DATUM.target_tokens, loss_inputs=inputs)
    run_dir = RunDir.create(tmp_path)
    run_dir.record("rollouts", 1, rollout_records([GROUP], [(datum, LOGPROBS)], decode))
    (sequence,) = next(run_dir.tables["rollouts"].read())["sequences"]
    assert sequence["old_logprobs"] == LOGPROBS.tolist() and sequence["values"] == (LOGPROBS + 1).tolist()
    assert sequence["reference_logprobs"] == (LOGPROBS - 1).tolist() and sequence["returns"] is None


def test_parts_without_newer_columns_stay_readable(tmp_path):
    table = RunDir.create(tmp_path).tables["rollouts"]
    kept = [field for field in table.schema if field.name not in ("masked", "turn_seconds", "sequences")]
    kept.append(pa.field("sequences", pa.list_(pa.struct({"tokens": pa.list_(pa.int32())}))))
    table.directory.mkdir()
    written = pa.Table.from_pylist([{"step": 3, "sequences": [{"tokens": [1]}]}], schema=pa.schema(kept))
    pq.write_table(written, table.directory / "000001.parquet")
    (record,) = table.read()
    assert record["masked"] is None and record["sequences"][0]["tokens"] == [1]
    assert record["sequences"][0]["turns"] is None


def test_every_table_says_step_and_attempt():
    assert all(schema.names[:2] == ["step", "attempt"] for schema in SCHEMAS.values())
