"""Records of rollouts: what people and viewers read about a step."""

import torch

from torchtitan_rl.observability.records import rollout_records
from torchtitan_rl.observability.run_dir import RunDir
from torchtitan_rl.observability.run_log import RunDirWriter
from torchtitan_rl.observability.schemas import SCHEMAS
from torchtitan_rl.types import Completion, Datum, Rollout, RolloutGroup, Task, Turn


def turn(prompt, tokens, versions, why):
    completion = Completion(
        tokens=tokens, logprobs=[-1.0] * len(tokens), policy_versions=versions, finish_reason=why
    )  # fmt: skip
    return Turn(prompt_tokens=prompt, completion=completion)


def rollout(id, *turns, **fields):
    task = Task(id="sort/train/17", prompt="cab=", answer=["abc"])
    return Rollout(id=id, task=task, turns=list(turns), group="7/0", **fields)


def decode(tokens):
    return "".join(chr(96 + token) for token in tokens)


PLAYED = rollout(
    "7/0/0",
    turn([1, 2], [4, 5], [2, 3], "stop"),
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
)
LOGPROBS = torch.tensor([-2.0, -1.0, -1.5, -3.0, -0.5])


def test_a_record_has_texts_turns_and_both_sides_of_the_training(tmp_path):
    run_dir = RunDir.create(tmp_path)
    writer = RunDirWriter(run_dir, decode)
    writer.fact("trained", {"sequences": [(DATUM, LOGPROBS)]})
    writer.fact("rollouts", {"step": 7, "groups": [GROUP]})
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
    }
    assert [(t["prompt"], t["text"], t["num_prompt_tokens"]) for t in turns] == [("ab", "de", 2), ("f", "g", 5)]
    assert (turns[0]["tokens"], turns[0]["policy_versions"], turns[0]["logprobs"]) == ([4, 5], [2, 3], [-1.0, -1.0])
    assert sequence["policy_logprobs"] == LOGPROBS.tolist() and sequence["loss_mask"] == [0, 1, 1, 0, 1]
    assert sequence["target_tokens"] == [2, 4, 5, 6, 7] and sequence["token_weights"] == [0, 0.25, 0.25, 0, 0.5]
    assert (second["advantage"], second["turns"], second["sequences"]) == (-0.5, [], [])


def test_without_a_decoder_a_record_has_no_tokens():
    records = rollout_records([GROUP], [(DATUM, LOGPROBS)], None)
    assert not {"turns", "sequences"} & records[0].keys() and records[0]["num_tokens"] == [2, 1]


def test_sequences_go_to_the_rollout_that_they_are_of():
    groups = [GROUP, RolloutGroup(id="8/0", rollouts=[rollout("8/0/0")], left_out="zero_variance")]
    records = rollout_records(groups, [(DATUM, LOGPROBS), (DATUM, LOGPROBS)], decode)
    assert [len(record["sequences"]) for record in records] == [2, 0, 0] and records[2]["left_out"] == "zero_variance"


def test_data_with_several_targets_a_token_are_recorded_without_what_is_per_target():
    targets = torch.stack([DATUM.target_tokens] * 3, dim=1)
    datum = Datum(
        tokens=DATUM.tokens, target_tokens=targets, loss_inputs={"loss_mask": torch.ones(5), "token_weights": targets}
    )
    (sequence,) = rollout_records([GROUP], [(datum, targets.float())], decode)[0]["sequences"]
    assert sequence["target_tokens"] is None and sequence["policy_logprobs"] is None
    assert sequence["tokens"] == DATUM.tokens.tolist() and sequence["advantages"] is None


def test_every_table_says_step_and_attempt():
    assert all(schema.names[:2] == ["step", "attempt"] for schema in SCHEMAS.values())
