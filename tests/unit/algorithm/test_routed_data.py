"""The generator's experts in datums: of one turn, of turns that extend each other, and what is refused."""

import dataclasses

import pytest
import torch

from tests.kit.refusal import refusal
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.routed_data import without_routing
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.dispatch.microbatches import check_alike, filler, pack
from torchtitan_rl.types import Completion, Rollout, RolloutGroup, Routing, Task, Turn

TASK = Task(id="t", prompt="")
REPLAY = AlgorithmConfig(expert_routing="replay")


def turn(prompt, tokens, first, **changes):
    """A turn whose generator's experts are numbered from `first`: token t went to t and t + 100 in the one layer."""
    numbers = torch.arange(first, first + len(prompt) + len(tokens) - 1, dtype=torch.uint8)
    completion = Completion(
        tokens=tokens,
        logprobs=[-1.0] * len(tokens),
        policy_versions=[0] * len(tokens),
        finish_reason="stop",
        routed_experts=torch.stack([numbers, numbers + 100], 1)[:, None],
    )
    return Turn(prompt_tokens=prompt, completion=dataclasses.replace(completion, **changes))


def data_of(*turns, config=REPLAY):
    rollouts = [Rollout(id=f"r/{i}", task=TASK, turns=list(turns), reward=float(i)) for i in range(2)]
    return to_datums([RolloutGroup(id="r", rollouts=rollouts)], config)


def experts(datum):
    return datum.routing.experts[:, 0, 0].tolist()


def test_a_datum_has_the_experts_of_every_token_that_is_read():
    [datum, _] = data_of(turn([5, 6, 7], [8, 9], 10))
    assert datum.tokens.tolist() == [5, 6, 7, 8] and experts(datum) == [10, 11, 12, 13]
    assert datum.routing.replayed and datum.routing.experts.shape == (4, 1, 2)
    compared = data_of(turn([5, 6, 7], [8, 9], 10), config=AlgorithmConfig(expert_routing="compare"))
    assert not compared[0].routing.replayed
    assert data_of(turn([5, 6, 7], [8, 9], 10), config=AlgorithmConfig())[0].routing is None


def test_turns_that_extend_each_other_have_the_experts_of_the_forward_that_sampled():
    # The last sampled token of a turn and the observation after it are prompt tokens of the next turn.
    first, second = turn([5, 6], [7, 8], 10), turn([5, 6, 7, 8, 1, 2], [3, 4], 50)
    [datum, _] = data_of(first, second)
    assert datum.tokens.tolist() == [5, 6, 7, 8, 1, 2, 3]
    assert experts(datum) == [10, 11, 12, 53, 54, 55, 56]


def test_a_turn_that_begins_anew_has_a_datum_with_experts_of_its_own():
    made = data_of(turn([5, 6], [7, 8], 10), turn([9, 6], [3], 50))
    assert [experts(datum) for datum in made[:2]] == [[10, 11, 12], [50, 51]]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"routed_experts": None}, "a completion of it has no routed_experts, which algorithm.expert_routing needs"),
        (
            {"routed_experts": torch.zeros(3, 1, 2)},
            "completion.routed_experts has shape (3, 1, 2) for a turn whose generator has read 4 tokens",
        ),
        ({"routed_experts": torch.zeros(4, 1, 2)}, "completion.routed_experts names an expert twice for one token"),
    ],
)
def test_experts_that_do_not_fit_are_refused(changes, complaint):
    assert f"rollout=r/0: {complaint}" in refusal(data_of, turn([5, 6, 7], [8, 9], 10, **changes))


def test_microbatches_carry_the_experts_packed():
    one, other = data_of(turn([5, 6], [7, 8], 10))[0], data_of(turn([5], [7], 50))[0]
    packed = pack([one, other])
    assert packed.routing.experts[:, 0, 0].tolist() == [10, 11, 12, 50] and packed.routing.replayed
    assert filler(one).routing.experts.shape == (1, 1, 2)
    assert pack(without_routing([one, other])).routing is None
    plain = without_routing([one])
    assert without_routing(plain) is plain
    assert "data[1].routing: is None where that of data[0] is (1, 2, True)" in refusal(check_alike, [one, *plain])
    compared = dataclasses.replace(other, routing=Routing(experts=other.routing.experts, replayed=False))
    assert "data[1].routing: is (1, 2, False)" in refusal(check_alike, [one, compared])
    assert "datum.routing.experts: has shape (3, 1, 2) for 1 tokens" in refusal(
        dataclasses.replace, other, routing=one.routing
    )
