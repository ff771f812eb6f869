"""Which datums compute their prompt together: who are siblings, the estimate, how a plan keeps to its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.mesh import Mesh
from torchtitan_rl import platform
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.dispatch.microbatches import plan_microbatches
from torchtitan_rl.dispatch.shared_plan import PrefixCost, plan_siblings, prefix_cost
from torchtitan_rl.families import Qwen3Shape
from torchtitan_rl.types import Datum, RankOutput

FREE = PrefixCost(pair=0.0, group=0.0)
SHAPE = Qwen3Shape(vocab_size=64, dim=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=768)


def datum(prompt, completion, *, first=1, turns=True, **columns):
    """`prompt` tokens that begin with `first`, and `completion` sampled tokens. Position t predicts token t + 1."""
    tokens = torch.tensor([first, *range(2, prompt + 1), *[50] * completion])
    mask_T = (torch.arange(len(tokens) - 1) >= prompt - 1).float()
    return Datum(
        tokens=tokens[:-1],
        target_tokens=tokens[1:],
        loss_inputs={"loss_mask": mask_T, **columns},
        turns=[(0, prompt - 1, completion)] if turns else None,
    )


def lengths_of(data):
    return [len(each) for each in data]


# Siblings.


def test_siblings_are_datums_with_the_same_prompt_wherever_they_stand():
    data = [datum(5, 2), datum(5, 3, first=9), datum(5, 4), datum(4, 2), datum(5, 1, first=9), datum(5, 1)]
    plan = plan_siblings(data, 1, 100, FREE)
    # Of a prompt of 5 tokens the last is computed by everybody: it predicts the first sampled token.
    assert plan.ranks == [[[0, 2, 5, 1, 4, 3]]]
    assert plan.shared == {2: 4, 5: 4, 4: 4}
    assert plan.of([0, 2, 5, 1, 4, 3]) == [0, 4, 4, 0, 4, 0] and plan.of([3]) is None
    assert plan.shared_frac == 12 / (5 * 5 + 4)


def test_without_turns_the_prompt_ends_where_the_loss_mask_begins():
    data = [datum(5, 2, turns=False), datum(5, 3, turns=False)]
    assert plan_siblings(data, 1, 100, FREE).shared == {1: 4}
    for each in data:
        del each.loss_inputs["loss_mask"]
    assert plan_siblings(data, 1, 100, FREE).shared == {}  # nothing says where the prompt ends


def test_a_completion_without_tokens_and_a_prompt_of_one_token():
    alone = Datum(tokens=torch.arange(4), target_tokens=torch.arange(4), loss_inputs={}, turns=[(0, 4, 0)])
    assert plan_siblings([alone, alone], 1, 100, FREE).shared == {1: 3}  # every datum computes a token of its own
    assert plan_siblings([datum(1, 3), datum(1, 2)], 1, 100, FREE).shared == {}


@pytest.mark.parametrize("name", ["target_tokens", "teacher_hidden"])
def test_datums_that_learn_other_things_from_a_prompt_are_no_siblings(name):
    states = torch.zeros(5, 3)
    first, second = datum(4, 2, teacher_hidden=states), datum(4, 2, teacher_hidden=states.clone())
    assert plan_siblings([first, second], 1, 100, FREE).shared == {1: 3}
    changed = second.target_tokens if name == "target_tokens" else second.loss_inputs["teacher_hidden"]
    changed[3] += 1  # of the prompt's last token
    assert plan_siblings([first, second], 1, 100, FREE).shared == {1: 3}
    changed[2] += 1
    assert plan_siblings([first, second], 1, 100, FREE).shared == {}


# The estimate.


def test_the_estimate_by_hand():
    cost = PrefixCost(pair=0.01, group=5.0)
    assert cost.alone(20) == 20 + 0.01 * 200
    # The first datum is whole; the second has 8 queries, of which each is computed with all 20 keys.
    assert cost.together(12, [20, 20]) == pytest.approx(22.0 + 5.0 + 8 + 0.01 * 8 * 20)
    # Of 1,024 queries the first 256 see 256 keys of their own, the next 512, and so on: 640 on average.
    assert cost.together(100, [110, 1124]) == pytest.approx(cost.alone(110) + 5 + 1024 + 0.01 * 1024 * (100 + 640))


def test_a_models_estimate(monkeypatch):
    config = TrainerConfig()
    assert prefix_cost(config, SHAPE) is None
    config.shared_prefix = "auto"
    cost = prefix_cost(config, SHAPE)
    assert 0 < cost.pair < 0.01 and 0 < cost.group < 100
    larger = Qwen3Shape(
        vocab_size=64, dim=1024, n_layers=4, n_heads=16, n_kv_heads=8, head_dim=64, hidden_dim=3072
    )  # fmt: skip
    assert prefix_cost(config, larger).group < cost.group / 10  # calls take as long, a token's products take longer
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    assert prefix_cost(config, SHAPE) is None


@pytest.mark.parametrize(
    ("prompt", "completion", "siblings", "shares"),
    [
        (512, 64, 8, True),
        (512, 64, 2, True),
        (2, 6, 8, False),  # one token of the prompt could be saved by each
        (64, 4000, 8, False),  # the prompt is nothing beside the completions
        (512, 64, 1, False),
    ],
)
def test_the_estimate_chooses_what_pays(prompt, completion, siblings, shares):
    cost = prefix_cost(TrainerConfig(shared_prefix="auto"), SHAPE)
    data = [datum(prompt, completion) for _ in range(siblings)]
    assert bool(plan_siblings(data, 1, 10**6, cost).shared) is shares


def test_the_quickstarts_prompts_are_too_short():
    shape = Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384)
    cost = prefix_cost(TrainerConfig(shared_prefix="auto"), shape)
    # Six letters and "=", as many sampled tokens and the end.
    assert plan_siblings([datum(7, 7) for _ in range(8)], 1, 10**6, cost).shared == {}
    assert plan_siblings([datum(20, 7) for _ in range(8)], 1, 10**6, cost).shared


def test_a_call_that_shares_nothing_has_the_plan_of_plain_packing():
    data = [datum(5, number % 7 + 1) for number in range(30)]
    plan = plan_siblings(data, 2, 40, PrefixCost(pair=0.0, group=1e9))
    assert plan.ranks == plan_microbatches(lengths_of(data), 2, 40)
    assert plan.shared == {} and plan.shared_frac == 0


# Limits.


def test_a_group_that_is_too_large_is_cut_in_parts():
    data = [datum(11, 5) for _ in range(5)]  # 10 tokens to share, 5 of their own
    plan = plan_siblings(data, 1, 25, FREE)
    assert plan.ranks == [[[0, 1, 2], [3, 4]]] and plan.shared == {1: 10, 2: 10, 4: 10}
    assert plan_siblings(data, 1, 19, FREE).shared == {}  # no two of them fit


def test_copies_of_keys_have_a_limit():
    data = [datum(41, 1) for _ in range(50)]  # 40 + 50 x 1 computed tokens, 41 keys of each
    plan = plan_siblings(data, 1, 100, FREE)
    assert [len(members) for members in plan.ranks[0]] == [9, 9, 9, 9, 9, 5]  # 9 x 41 <= 4 x 100 < 10 x 41


def test_every_rank_gets_a_part():
    data = [datum(30, 10) for _ in range(8)]
    plan = plan_siblings(data, 4, 1000, FREE)
    assert [[len(members) for members in of_rank] for of_rank in plan.ranks] == [[2]] * 4
    # Of two siblings one on each rank is as fast as both on one.
    assert plan_siblings(data[:2], 2, 1000, FREE).shared == {}


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    groups=st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=6)), min_size=1),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 60),
    order=st.randoms(use_true_random=False),
)
def test_any_plan_has_every_datum_once_behind_its_sibling_and_within_the_cap(groups, num_ranks, max_tokens, order):
    data = [
        datum(prompt, own, first=number) for number, (prompt, owns) in enumerate(groups, start=1) for own in owns
    ]  # fmt: skip
    order.shuffle(data)
    plan = plan_siblings(data, num_ranks, max_tokens, FREE)
    everywhere = [members for of_rank in plan.ranks for members in of_rank]
    assert sorted(index for members in everywhere for index in members) == list(range(len(data)))
    assert len({len(of_rank) for of_rank in plan.ranks}) == 1
    for members in everywhere:
        sizes = plan.of(members) or [0] * len(members)
        assert not members or sizes[0] == 0
        whole = None
        for index, size in zip(members, sizes, strict=True):
            whole = data[index] if not size else whole
            assert size < len(data[index]) and torch.equal(data[index].tokens[:size], whole.tokens[:size])
        computed = sum(len(data[i]) for i in members) - sum(sizes)
        assert len(members) <= 1 or computed <= max_tokens


# The client.


class Answering(Mesh):
    """Answers a call with a row per datum, and keeps the shards."""

    def call_split(self, operation, shards, *args):
        self.shards = shards

        async def answers():
            return [
                RankOutput(
                    rows={"policy_logprobs": [torch.zeros(n) for batch in of_rank for n in batch.lengths]},
                    loss=0.0,
                    sums={},
                )
                for of_rank in shards
            ]

        return answers()


@pytest.mark.parametrize(("cost", "shared", "fraction"), [(None, None, None), (FREE, [0, 4], 0.4)])
async def test_a_client_sends_what_is_shared_and_says_how_much(cost, shared, fraction):
    mesh = Answering()
    client = MeshTrainingClient(
        mesh, max_tokens_per_microbatch=99, max_datum_tokens=99, temperature=1.0, vocab_size=64, prefix_cost=cost
    )
    output = await client.forward([datum(5, 2), datum(5, 3)])
    ((batch,),) = mesh.shards
    assert batch.shared == shared and batch.lengths == [6, 7] and len(batch.tokens_T) == 13
    assert output.metrics.get("prompt/shared_frac") == fraction
    assert lengths_of(output.policy_logprobs) == [6, 7]
