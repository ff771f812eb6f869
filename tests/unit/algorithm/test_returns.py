"""The KL to the reference inside the return, with and without a critic: by hand, in float64, and as verl has it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.rollouts import group, rollout, turn
from torchtitan_rl.algorithm import presets
from torchtitan_rl.algorithm.advantages import reinforce, rloo
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.gae import gae, with_gae
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.returns import episodes_of, kl_costs, reward_to_go, with_kl_returns
from torchtitan_rl.algorithm.whitening import whitened
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.train.role_scores import with_roles
from torchtitan_rl.train.step import training_data

IN_RETURN = {"kl_coef": 0.5, "kl_estimator": "k1", "kl_in": "return"}


def scored(*groups, config, reference=None):
    """Datums of groups with the reference's log-probabilities: those of one list over all tokens, in order, or one less
    than the generator's everywhere, so that k1 is 1."""
    data = to_datums(list(groups), config)
    numbers = iter(reference or [])
    rows = [
        torch.tensor([next(numbers) for _ in range(len(datum))])
        if reference
        else datum.loss_inputs["sampling_logprobs"] - 1.0
        for datum in data
    ]
    return with_inputs(data, reference_logprobs=rows)


def advantages(data):
    return [datum.loss_inputs["advantages"].tolist() for datum in data]


def test_every_token_pays_for_itself_and_those_after_it():
    # Three tokens of k1 = 1 and a coefficient of 1/2: 1.5, 1 and 0.5 come off the advantage 2.
    config = AlgorithmConfig(advantage_fn=reinforce, **IN_RETURN)
    data = scored(group(rollout("a", turn([1, 1], [2, 3, 4]), reward=2.0)), config=config)
    assert advantages(with_kl_returns(data, config)) == [[0.0, 0.5, 1.0, 1.5]]
    assert advantages(data) == [[0.0, 2.0, 2.0, 2.0]]  # what came in is as it was


def test_the_discount_is_of_costs_and_of_the_rollouts_advantage():
    # Rewards -0.5, -0.5 and 2 - 0.5, discount 1/2: 1.5, then -0.5 + 0.75, then -0.5 + 0.125.
    config = AlgorithmConfig(advantage_fn=reinforce, gae_gamma=0.5, **IN_RETURN)
    data = scored(group(rollout("a", turn([1], [2, 3, 4]), reward=2.0)), config=config)
    assert advantages(with_kl_returns(data, config)) == [[-0.375, 0.25, 1.5]]


def test_observations_cost_nothing_and_discount_nothing():
    config = AlgorithmConfig(advantage_fn=reinforce, gae_gamma=0.5, **IN_RETURN)
    two = rollout("a", turn([1], [2, 3]), turn([1, 2, 3, 8, 8], [4]), reward=2.0)
    data = scored(group(two), config=config)
    assert advantages(with_kl_returns(data, config)) == [[-0.375, 0.25, 0.0, 0.0, 1.5]]


def test_datums_of_a_rollout_are_one_episode():
    config = AlgorithmConfig(advantage_fn=reinforce, gae_gamma=0.5, **IN_RETURN)
    two, other = rollout("a", turn([1], [2, 3]), turn([9], [4]), reward=2.0), rollout("b", turn([1], [7]), reward=1.0)
    data = scored(group(two, other), config=config)
    assert episodes_of(data) == [[0, 1], [2]]
    assert advantages(with_kl_returns(data, config)) == [[-0.375, 0.25], [1.5], [0.5]]


def test_a_masked_rollout_and_a_masked_token_have_no_advantage_and_no_cost():
    config = AlgorithmConfig(advantage_fn=reinforce, **IN_RETURN)
    masked = rollout("a", turn([1], [2, 3]), reward=2.0)
    masked.masked = True
    odd = rollout("b", turn([1], [2, 3, 4], [-1.0, -math.inf, -1.0]), reward=2.0)
    data = scored(group(masked, odd), config=config)
    assert advantages(with_kl_returns(data, config)) == [[0.0, 0.0], [1.0, 0.0, 1.5]]
    far = with_inputs(data, reference_logprobs=[torch.full((len(datum),), -1e30) for datum in data])
    assert kl_costs(far[0], config).tolist() == [0.0, 0.0]
    assert kl_costs(far[1], config).tolist() == [10.0, 0.0, 10.0]  # a difference counts as 20 at most


def test_precomputed_advantages_are_returns_already():
    config = AlgorithmConfig(gae_gamma=0.5, **IN_RETURN)
    own = group(rollout("a", turn([1], [2, 3], advantages=[4.0, 5.0]), reward=0.0))
    data = scored(own, config=config)
    assert advantages(with_kl_returns(data, config, keep_groups={0})) == [[4.0 - 0.75, 5.0 - 0.5]]
    values = [torch.zeros(2)]
    (kept,) = with_gae(data, [1.0], values, config, keep_groups={0})
    assert kept.loss_inputs["advantages"].tolist() == [4.0 - 0.75, 5.0 - 0.5]
    # The critic learns what the rollout earned: 1 - 0.5 at its end, and half of that less 0.5 before.
    assert kept.loss_inputs["returns"].tolist() == [0.25 - 0.5, 0.5]


def test_the_baseline_of_siblings_is_of_rewards_alone():
    config = AlgorithmConfig(advantage_fn=rloo, **IN_RETURN)
    pair = group(rollout("a", turn([1], [2, 3]), reward=1.0), rollout("b", turn([1], [2]), reward=0.0))
    assert advantages(with_kl_returns(scored(pair, config=config), config)) == [[0.0, 0.5], [-1.5]]


def returns_in_float64(reward, kls, mask, coef, gamma):
    """Term by term: over the trained tokens from t on, gamma^distance x -coef x kl, and the reward at the end."""
    steps = [t for t, trained in enumerate(mask) if trained]
    expected = np.zeros(len(mask))
    for i, t in enumerate(steps):
        terms = [gamma ** (j - i) * -coef * kls[steps[j]] for j in range(i, len(steps))]
        expected[t] = math.fsum([*terms, gamma ** (len(steps) - 1 - i) * reward])
    return expected


tokens = st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=12)


@settings(deadline=None, derandomize=True)
@given(tokens=tokens, reward=st.floats(-2, 2), gamma=st.floats(0, 1), coef=st.floats(0, 2))
def test_returns_are_the_sum_of_their_terms(tokens, reward, gamma, coef):
    kls, mask = zip(*tokens)
    rewards_T = -coef * torch.tensor(kls, dtype=torch.float64)
    mask_T = torch.tensor(mask, dtype=torch.float32)
    if any(mask):
        rewards_T[mask_T.nonzero()[-1]] += reward
    ours = reward_to_go(rewards_T, mask_T, gamma=gamma)
    assert ours.tolist() == pytest.approx(returns_in_float64(reward, kls, mask, coef, gamma), rel=1e-10, abs=1e-10)


@settings(deadline=None, derandomize=True)
@given(tokens=tokens, reward=st.floats(-2, 2), gamma=st.floats(0, 1), lam=st.floats(0, 1), seed=st.integers(0, 99))
def test_gae_with_costs_is_the_sum_of_temporal_differences(tokens, reward, gamma, lam, seed):
    """Equation 16 of the paper over the trained tokens: each earns -cost, and the last the rollout's reward too."""
    kls, mask = zip(*tokens)
    values = np.random.default_rng(seed).normal(size=len(mask))
    steps = [t for t, trained in enumerate(mask) if trained]
    ends = [values[t] for t in steps[1:]] + [0.0]
    deltas = [(reward if t == steps[-1] else 0.0) - 0.3 * kls[t] + gamma * v - values[t] for t, v in zip(steps, ends)]
    expected = np.zeros(len(mask))
    for i, t in enumerate(steps):
        expected[t] = math.fsum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(steps)))
    costs_T = 0.3 * torch.tensor(kls, dtype=torch.float64)
    ours, returns = gae(
        torch.tensor(values), torch.tensor(mask, dtype=torch.float32), reward, gamma=gamma, lam=lam, costs_T=costs_T
    )
    assert ours.tolist() == pytest.approx(expected.tolist(), rel=1e-10, abs=1e-10)
    assert returns.tolist() == pytest.approx(((expected + values) * np.array(mask)).tolist(), rel=1e-10, abs=1e-10)


def rewards_of_verl(scores, policy, reference, mask, beta):
    """verl/trainer/ppo/ray_trainer.py, apply_kl_penalty with kl_penalty="kl": what a token earns."""
    return scores - beta * (policy - reference) * mask


def returns_of_verl(token_rewards, gamma):
    """verl/trainer/ppo/core_algos.py, compute_reinforce_plus_plus_outcome_advantage before it whitens, of one turn."""
    returns, running = np.zeros_like(token_rewards), 0.0
    for t in reversed(range(len(token_rewards))):
        running = token_rewards[t] + gamma * running
        returns[t] = running
    return returns


def gae_of_verl(token_rewards, values, gamma, lam):
    """verl/trainer/ppo/core_algos.py, compute_gae_advantage_return before it whitens, for a response of one turn."""
    advantages, next_value, running = np.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        running = token_rewards[t] + gamma * next_value - values[t] + gamma * lam * running
        advantages[t], next_value = running, values[t]
    return advantages, advantages + values


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_verl_computes_before_it_whitens(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    policy, reference, values = -rng.random(size), -rng.random(size) * 3, rng.normal(size=size)
    scores = np.zeros(size)
    scores[-1] = 1.5
    token_rewards = rewards_of_verl(scores, policy, reference, np.ones(size), 0.5)
    config = AlgorithmConfig(advantage_fn=reinforce, gae_gamma=0.9, gae_lambda=0.8, **IN_RETURN)
    played = group(rollout("a", turn([1], list(range(size)), policy.tolist()), reward=1.5))
    data = scored(played, config=config, reference=reference.tolist())
    (ours,) = advantages(with_kl_returns(data, config))
    assert ours == pytest.approx(returns_of_verl(token_rewards, 0.9).tolist(), rel=1e-6, abs=1e-6)
    (datum,) = with_gae(data, [1.5], [torch.tensor(values)], config)
    for name, theirs in zip(("advantages", "returns"), gae_of_verl(token_rewards, values, 0.9, 0.8)):
        assert datum.loss_inputs[name].tolist() == pytest.approx(theirs.tolist(), rel=1e-6, abs=1e-6)


def reinforce_pp_in_float64(sequences, beta, gamma):
    """REINFORCE++ by its paper: A_t = r - beta x sum of k1 from t on, whitened over all tokens.
    `sequences` are (reward, k1 of each token); gamma discounts as in verl and OpenRLHF."""
    returns = []
    for reward, kls in sequences:
        size = len(kls)
        returns.append(
            [
                gamma ** (size - 1 - t) * reward - beta * math.fsum(gamma ** (s - t) * kls[s] for s in range(t, size))
                for t in range(size)
            ]
        )
    everything = np.array([number for row in returns for number in row])
    return [((np.array(row) - everything.mean()) / everything.std()).tolist() for row in returns]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
async def test_reinforce_pp_is_its_paper_and_verl(gamma):
    """Seven rollouts of 1 to 6 tokens, through all that a run does with them; and the same in float64."""
    rng, config = np.random.default_rng(5), presets.reinforce_pp(kl_coef=0.3, gae_gamma=gamma)
    sizes, rewards = rng.integers(1, 7, 7).tolist(), rng.normal(size=7).tolist()
    policy, reference = ([-rng.random(size) * 2 for size in sizes] for _ in range(2))
    sequences = [(r, (p - q).tolist()) for r, p, q in zip(rewards, policy, reference, strict=True)]
    expected = reinforce_pp_in_float64(sequences, 0.3, gamma)

    token_rewards = [torch.tensor([-0.3 * kl for kl in kls], dtype=torch.float64) for _, kls in sequences]
    for row_T, reward in zip(token_rewards, rewards, strict=True):
        row_T[-1] += reward
    masks = [torch.ones(size) for size in sizes]
    returns = [reward_to_go(row_T, mask_T, gamma=gamma) for row_T, mask_T in zip(token_rewards, masks, strict=True)]
    for ours, row in zip(whitened(returns, masks), expected, strict=True):
        assert ours.tolist() == pytest.approx(row, rel=1e-10, abs=1e-10)

    groups = [
        group(rollout(f"{i}", turn([1], [2] * sizes[i], policy[i].tolist()), reward=rewards[i]), id=f"0/{i}")
        for i in range(7)
    ]
    roles = {"policy": None, "reference": Answers(reference)}
    data = await training_data(groups, roles, config)
    for ours, row in zip(advantages(data), expected, strict=True):
        assert ours == pytest.approx(row, rel=1e-5, abs=1e-5)

    theirs = [returns_of_verl(row_T.numpy(), gamma) for row_T in token_rewards]  # then masked_whiten, unbiased
    everything = np.concatenate(theirs)
    for ours, row in zip(advantages(data), theirs, strict=True):
        unbiased = (row - everything.mean()) / np.sqrt(everything.var(ddof=1) + 1e-8)
        ratio = everything.std() / everything.std(ddof=1)
        assert np.array(ours) * ratio == pytest.approx(unbiased, rel=1e-5, abs=1e-5)


def test_without_a_cost_the_return_is_the_advantage_and_gae_is_gae():
    played = group(rollout("a", turn([1], [2, 3, 4]), reward=2.0), rollout("b", turn([1], [5]), reward=1.0))
    plain = AlgorithmConfig(advantage_fn=rloo, gae_lambda=0.5)
    config = AlgorithmConfig(advantage_fn=rloo, gae_lambda=0.5, **IN_RETURN)
    data = scored(played, config=plain)
    same = with_inputs(data, reference_logprobs=[datum.loss_inputs["sampling_logprobs"] for datum in data])
    assert advantages(with_kl_returns(same, config)) == advantages(data)
    values = [torch.tensor([0.25, -0.5, 0.125]), torch.tensor([0.5])]
    for ours, theirs in zip(with_gae(same, [2.0, 1.0], values, config), with_gae(data, [2.0, 1.0], values, plain)):
        assert torch.equal(ours.loss_inputs["advantages"], theirs.loss_inputs["advantages"])
        assert torch.equal(ours.loss_inputs["returns"], theirs.loss_inputs["returns"])


def test_the_order_of_rollouts_and_groups_changes_nothing():
    config = AlgorithmConfig(advantage_fn=rloo, gae_gamma=0.9, **IN_RETURN)
    rollouts = [rollout(f"{i}", turn([1], [2] * (i + 1)), reward=float(i % 3)) for i in range(6)]

    def by_rollout(*orders):
        groups = [group(*(rollouts[i] for i in order), id=f"0/{g}") for g, order in enumerate(orders)]
        data = with_kl_returns(scored(*groups, config=config), config)
        names = [rollout.id for made in groups for rollout in made.rollouts]
        return dict(zip(names, advantages(data), strict=True))

    before = by_rollout([0, 1, 2], [3, 4, 5])
    after = by_rollout([5, 3, 4], [1, 0, 2])
    assert sorted(after) == sorted(before) == list("012345")
    for name in before:
        assert after[name] == pytest.approx(before[name])


class Scorer:
    """A role's client that gives each datum the same number at every token."""

    def __init__(self, number):
        self.number = number

    async def forward(self, data, **_):
        rows = [torch.full((len(datum),), self.number) for datum in data]
        return SimpleNamespace(policy_logprobs=rows, values=rows)


class Answers:
    """A role's client that has its numbers ready, one row per datum."""

    def __init__(self, rows):
        self.rows = [torch.tensor(row, dtype=torch.float32) for row in rows]

    async def forward(self, data, **_):
        return SimpleNamespace(policy_logprobs=self.rows)


async def test_roles_score_and_the_return_has_the_kl():
    """Generator -1, reference -2, so k1 is 1; the critic expects 1/4 everywhere."""
    played = group(rollout("a", turn([1], [2, 3, 4]), reward=2.0))
    config = AlgorithmConfig(advantage_fn=reinforce, **IN_RETURN)
    roles = {"policy": None, "reference": Scorer(-2.0)}
    data = await with_roles(to_datums([played], config), [played], roles, config)
    assert advantages(data) == [[0.5, 1.0, 1.5]] and played.advantages == [2.0]
    data = await with_roles(to_datums([played], config), [played], roles | {"critic": Scorer(0.25)}, config)
    assert advantages(data) == [[0.25, 0.75, 1.25]] and played.advantages is None
    assert data[0].loss_inputs["returns"].tolist() == [0.5, 1.0, 1.5]
