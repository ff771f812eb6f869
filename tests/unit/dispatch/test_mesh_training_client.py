"""What comes back from ranks, in the order of the data, and the calls refused before any rank hears of them."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.mesh import Mesh
from torchtitan_rl import platform
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient, _agreed, _merge
from torchtitan_rl.dispatch.microbatches import plan_microbatches
from torchtitan_rl.types import Datum, OptimStepOutput, RankOutput
from torchtitan_rl.weights.finite import NotFinite, WeightsNotFinite
from torchtitan_rl.weights.layout import Manifest


def datum(length, loss_mask=None):
    loss_inputs = {"token_weights": torch.ones(length)}
    if loss_mask is not None:
        loss_inputs["loss_mask"] = torch.tensor(loss_mask)
    return Datum(tokens=torch.arange(length), target_tokens=torch.arange(length), loss_inputs=loss_inputs)


def logprobs(*rows):
    return {"policy_logprobs": list(rows)}


def test_outputs_come_back_in_input_order_and_sums_become_means():
    data = [datum(2, [0.0, 1.0]), datum(1, [1.0]), datum(3, [0.0, 1.0, 1.0])]
    zero, one, two, of_filler = (torch.full((n,), -float(n)) for n in (2, 1, 3, 9))
    merged = _merge(
        [
            RankOutput(
                rows=logprobs(two, zero), loss=0.5, sums={"policy/entropy": 6.0, "mismatch/logprob_diff_max": 0.25}
            ),
            RankOutput(
                rows=logprobs(one, of_filler),
                loss=0.25,
                sums={"policy/entropy": 2.0, "mismatch/logprob_diff_max": 0.75},
            ),
        ],
        [[[2], [0]], [[1], []]],
        data,
        who="policy.forward",
    )
    assert [x is y for x, y in zip(merged.policy_logprobs, [zero, one, two], strict=True)] == [True] * 3
    assert merged.loss == 0.75  # a sum: how it is averaged is in the weights
    assert merged.num_tokens == 4
    assert merged.metrics == {"policy/entropy": 2.0, "mismatch/logprob_diff_max": 0.75}


def test_a_fillers_output_is_dropped_wherever_it_stands():
    of_filler, zero, one = torch.tensor([-9.0]), torch.tensor([-1.0]), torch.tensor([-2.0])
    answer = RankOutput(rows=logprobs(of_filler, one, of_filler, zero), loss=0.0, sums={})
    merged = _merge([answer], [[[], [1], [], [0]]], [datum(1), datum(1)], who="policy.forward")
    assert merged.policy_logprobs == [zero, one]


def test_a_maximum_below_zero_is_not_lifted_to_zero():
    merged = _merge(
        [RankOutput(rows=logprobs(torch.zeros(1)), loss=0.0, sums={"x_max": value}) for value in (-3.0, -2.0)],
        [[[0]], [[1]]],
        [datum(1), datum(1)],
        who="policy.forward",
    )
    assert merged.metrics == {"x_max": -2.0}


def test_data_without_a_loss_mask_count_every_token():
    answer = RankOutput(rows=logprobs(torch.zeros(3)), loss=0.0, sums={"x": 6.0})
    merged = _merge([answer], [[[0]]], [datum(3)], who="policy.forward")
    assert merged.num_tokens == 3 and merged.metrics == {"x": 2.0}


def test_a_metric_over_no_trained_token_is_zero_not_an_error():
    data = [datum(2, [0.0, 0.0])]
    answer = RankOutput(rows=logprobs(torch.zeros(2)), loss=0.0, sums={"x": 0.0})
    merged = _merge([answer], [[[0]]], data, who="policy.forward")
    assert merged.num_tokens == 0 and merged.metrics == {"x": 0.0}


def test_every_kind_of_output_comes_back_in_input_order():
    def rows(name, *indices):
        return {name: [torch.full((n, 2), float(n)) for n in indices]}

    data = [datum(2), datum(1), datum(3)]
    merged = _merge(
        [
            RankOutput(
                rows=logprobs(torch.zeros(3), torch.zeros(2)) | rows("top_tokens", 3, 2) | rows("hidden", 3, 2),
                loss=0.0,
                sums={},
            ),
            RankOutput(
                rows=logprobs(torch.zeros(1), torch.zeros(9)) | rows("top_tokens", 1, 9) | rows("hidden", 1, 9),
                loss=0.0,
                sums={},
            ),
        ],
        [[[2], [0]], [[1], []]],
        data,
        who="policy.forward",
    )
    for found in (merged.top_tokens, merged.hidden):
        assert [(len(row), row[0, 0].item()) for row in found] == [(2, 2.0), (1, 1.0), (3, 3.0)]
    assert merged.top_logprobs == merged.values == []


@settings(deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 30),
)
def test_order_survives_any_plan(lengths, num_ranks, max_tokens):
    """Every datum's output is tagged with its index and put where the plan says."""
    plan = plan_microbatches(lengths, num_ranks, max_tokens)
    answers = [
        RankOutput(
            loss=0.0,
            sums={"x": float(sum(len(members) for members in microbatches))},
            rows=logprobs(
                *(
                    torch.full((lengths[i],), float(i)) if i >= 0 else torch.tensor([-1.0])
                    for members in microbatches
                    for i in members or [-1]
                )
            ),
        )
        for microbatches in plan
    ]
    merged = _merge(answers, plan, [datum(length) for length in lengths], who="policy.forward")
    assert [x.tolist() for x in merged.policy_logprobs] == [[float(i)] * n for i, n in enumerate(lengths)]
    assert merged.metrics["x"] == pytest.approx(len(lengths) / sum(lengths))


def test_a_call_without_data_is_refused():
    client = MeshTrainingClient(None, max_tokens_per_microbatch=8, max_datum_tokens=4, temperature=1.0, vocab_size=7)
    with pytest.raises(ValueError) as caught:
        client.forward_backward([], cross_entropy)
    assert str(caught.value) == "forward_backward.data=[]: no datums; skip the call when nothing is left to train on"


def test_a_datum_longer_than_the_context_is_refused_by_its_position():
    client = MeshTrainingClient(None, max_tokens_per_microbatch=8, max_datum_tokens=4, temperature=1.0, vocab_size=7)
    with pytest.raises(ValueError) as caught:
        client.forward([datum(4), datum(5)])
    assert str(caught.value) == (
        "forward.data[1]: 5 tokens, the trainer's context is trainer.training.seq_len=4; raise it or shorten the datum"
    )


def test_datums_with_another_number_of_targets_are_refused_whatever_their_microbatch():
    client = MeshTrainingClient(Mesh(), max_tokens_per_microbatch=1, max_datum_tokens=4, temperature=1.0, vocab_size=7)
    several = Datum(
        tokens=torch.arange(2),
        target_tokens=torch.zeros(2, 3, dtype=torch.int64),
        loss_inputs={"token_weights": torch.ones(2)},
    )
    with pytest.raises(ValueError) as caught:
        client.forward([datum(2), several])
    assert str(caught.value) == (
        "forward.data[1].target_tokens: is (T, 3) where that of data[0] is (T,); give every "
        "datum of one call as many per token"
    )


class NeverAnswers:
    """A mesh of one rank that keeps the microbatches of a call."""

    role, data_parallel_size = "policy", 1

    def call_split(self, operation, shards, *arguments):
        (self.microbatches,) = shards
        return asyncio.get_running_loop().create_future()


@pytest.mark.skipif(platform.device_type() == "cuda", reason="a GPU's microbatches are larger")
async def test_microbatches_have_the_devices_own_size_where_the_config_says_none():
    mesh = NeverAnswers()
    client = MeshTrainingClient(mesh, max_tokens_per_microbatch=0, max_datum_tokens=2000, temperature=1.0, vocab_size=7)
    client.forward([datum(2000) for _ in range(3)]).cancel()
    assert [microbatch.lengths for microbatch in mesh.microbatches] == [[2000, 2000], [2000]]  # 4,096 tokens at most


def step(**changes):
    return OptimStepOutput(**{"grad_norm": 1.0, "lr": 0.1, "policy_version": 3, "skipped": False, **changes})


def test_ranks_may_round_the_norm_differently_and_nothing_else():
    assert _agreed([step(), step(grad_norm=1.0 + 1e-7)], who="policy.optim_step") == step()
    nan = step(grad_norm=float("nan"), skipped=True)
    assert _agreed([nan, nan], who="policy.optim_step").skipped
    for other in (step(grad_norm=1.1), step(policy_version=4), step(skipped=True), step(lr=0.2)):
        with pytest.raises(RuntimeError, match="policy.optim_step: ranks disagree"):
            _agreed([step(), other], who="policy.optim_step")


def test_a_rank_that_answers_with_too_few_rows_is_named():
    with pytest.raises(RuntimeError, match="policy.forward: data-parallel rank 1 answered with 0 rows for 1"):
        _merge(
            [RankOutput(rows=logprobs(*rows), loss=0.0, sums={}) for rows in ([torch.zeros(1)], [])],
            [[[0]], [[1]]],
            [datum(1), datum(1)],
            who="policy.forward",
        )


async def test_a_version_that_one_rank_found_not_finite_is_discarded_and_named():
    async def push(*answers):
        mesh = Mesh(push_weights=list(answers))
        client = MeshTrainingClient(
            mesh, max_tokens_per_microbatch=8, max_datum_tokens=8, temperature=1.0, vocab_size=64
        )
        try:
            return await client.push_weights(torch.float32, "store", True)
        finally:
            discarded.extend(entry[2] for entry in mesh.log if entry[1] == "discard_weights")

    discarded, manifest = [], Manifest(version=7, entries={}, nbytes=0)
    assert await push(manifest, 7) is manifest
    with pytest.raises(RuntimeError, match="ranks disagree: \\[7, 8\\]"):
        await push(manifest, 8)
    with pytest.raises(WeightsNotFinite, match="policy_version=7: norm.weight has a NaN or an infinity"):
        await push(NotFinite(version=7, tensor="norm.weight"), 7)
    assert discarded == [7]
