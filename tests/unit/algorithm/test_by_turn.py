"""Losses by position and by turn, against numbers worked out by hand."""

from types import SimpleNamespace

import pytest
import torch
from torchtitan.config import ParallelismConfig

from tests.kit.rollouts import group, rollout, turn
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.dispatch.microbatches import filler, pack, plan_microbatches
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.model.train_step import accumulate_gradients
from torchtitan_rl.types import Datum, LossInputs
from torchtitan_rl.validation.functions import probe_loss

NAN, OFF = float("nan"), -1


def rollouts():
    """Two turns that extend each other, with an observation between; and two that do not, so two datums."""
    extending = rollout("a", turn([5, 6], [7, 8, 9]), turn([5, 6, 7, 8, 9, 4, 4], [3, 2]), reward=1.0)
    apart = rollout("b", turn([5, 6], [7]), turn([6, 6, 6], [8, 9]), reward=0.0)
    return group(extending, apart)


def inputs_of(batch) -> LossInputs:
    """What a trainer gives a loss for a packed microbatch, less the model: log-probability -0.1 x the target."""
    datum_T = torch.repeat_interleave(torch.tensor(batch.lengths))
    return LossInputs(
        policy_logprobs=-0.1 * batch.target_tokens_T,
        entropy=torch.zeros(len(datum_T)),
        datum=datum_T,
        num_datums=len(batch.lengths),
        tensors=dict(batch.loss_inputs),
        turns=batch.turns,
    )


def test_position_and_turn_of_every_token():
    first, *apart = to_datums([rollouts()], AlgorithmConfig())
    inputs = inputs_of(pack([first]))
    # targets:           6    7  8  9  4    4    3  2
    assert inputs.position.tolist() == [OFF, 0, 1, 2, OFF, OFF, 0, 1]
    assert inputs.turn.tolist() == [OFF, 0, 0, 0, OFF, OFF, 1, 1]
    assert inputs.position.dtype == inputs.turn.dtype == torch.int64
    packed = inputs_of(pack([apart[1], apart[0]]))  # in any order: targets 6 6 8 9 | 6 7
    assert packed.position.tolist() == [OFF, OFF, 0, 1, OFF, 0] and packed.turn.tolist() == [OFF, OFF, 1, 1, OFF, 0]


def test_a_token_that_does_not_train_has_its_position_all_the_same():
    made = group(rollout("a", turn([5], [7, 8, 9], [-1.0, -float("inf"), -1.0]), reward=1.0))
    inputs = inputs_of(pack(to_datums([made], AlgorithmConfig())))
    assert inputs.loss_mask.tolist() == [1, 0, 1] and inputs.position.tolist() == [0, 1, 2]
    masked = group(rollout("a", turn([5], [7, 8]), reward=1.0, masked=True))
    inputs = inputs_of(pack(to_datums([masked], AlgorithmConfig())))
    assert inputs.loss_mask.tolist() == [0, 0] and inputs.position.tolist() == [0, 1]


def by_position(inputs):
    """Log-probabilities times 10 for the first token of a completion, times 1 for later ones; doubled in turn 1."""
    factor = torch.where(inputs.position == 0, 10.0, 1.0) * torch.where(inputs.turn == 1, 2.0, 1.0)
    return -(inputs.token_weights * torch.where(inputs.loss_mask > 0, factor * inputs.policy_logprobs, 0.0)).sum(), {}


BY_HAND = (10 * 0.7 + 0.8 + 0.9 + 2 * 10 * 0.3 + 2 * 0.2 + 10 * 0.7 + 2 * 10 * 0.8 + 2 * 0.9) / 8
"""Targets 7 8 9 | 3 2 of one rollout, 7 | 8 9 of the other, each -0.1 x the target, over eight trained tokens."""


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("max_tokens", [1, 6, 100])
def test_a_loss_by_position_is_the_same_however_it_is_split(num_ranks, max_tokens):
    data = to_datums([rollouts()], AlgorithmConfig())
    plan = plan_microbatches([len(datum) for datum in data], num_ranks, max_tokens)
    batches = [pack([data[i] for i in m]) if m else filler(data[0]) for microbatches in plan for m in microbatches]
    objective = policy_objective(AlgorithmConfig(loss_fn=by_position))
    assert sum(float(objective(inputs_of(batch))[0]) for batch in batches) == pytest.approx(BY_HAND)


def numbered(inputs):
    """A sum of position + 10 x turn over trained tokens, which has a gradient of 0."""
    number = (inputs.position + 10 * inputs.turn).float() + 0 * inputs.policy_logprobs
    return torch.where(inputs.loss_mask > 0, number, 0.0).sum(), {}


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_a_real_model_gives_them_to_its_loss(multiple_of):
    shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 24}
    spec = build_spec(ModelConfig(shape=Qwen3Shape(vocab_size=11, max_seq_len=16, **shape)))
    view = SimpleNamespace(parallelism=ParallelismConfig(spmd_backend="partial_dtensor"))
    model = training_spec(spec, view, attention="sdpa", chunk_bytes=1024).model.build()
    model.init_weights()
    batch = pack(to_datums([rollouts()], AlgorithmConfig()))
    result = accumulate_gradients(model, [batch], numbered, torch.device("cpu"), multiple_of=multiple_of)
    assert result.loss == (0 + 1 + 2 + 10 + 11) + 0 + (10 + 11)


def test_a_loss_by_position_passes_the_check_before_a_start():
    columns = {"token_weights", "loss_mask", "advantages", "sampling_logprobs"}
    probe_loss("algorithm.loss_fn", by_position, {}, outputs=["policy_logprobs"], columns=columns)


def test_nothing_is_computed_for_a_loss_that_reads_neither():
    inputs = inputs_of(pack(to_datums([rollouts()], AlgorithmConfig())))
    assert float(inputs.token_weights.sum()) == pytest.approx(1.0) and not {"position", "turn"} & inputs.tensors.keys()
    _ = inputs.position
    assert {"position", "turn"} <= inputs.tensors.keys()  # computed once


def test_data_that_do_not_say_where_their_turns_are_are_refused():
    tokens, mask = torch.tensor([5, 6]), torch.ones(2)
    datum = Datum(tokens=tokens, target_tokens=tokens, loss_inputs={"token_weights": mask, "loss_mask": mask})
    with pytest.raises(AttributeError, match="set Datum.turns where datums are built"):
        _ = inputs_of(pack([datum])).position
    datum.turns = [(0, 1, 2)]
    with pytest.raises(ValueError, match="turn 0 is at targets 1 to 3 of 2"):
        _ = inputs_of(pack([datum])).turn


def leave_one_out(rewards_G):
    rewards = rewards_G.tolist()
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


@pytest.mark.parametrize("returned", [leave_one_out, lambda r: tuple(leave_one_out(r)), lambda r: list(r - r.mean())])
def test_a_list_is_as_good_as_a_tensor(returned):
    made = group(*(rollout(str(i), turn([5], [7]), reward=reward) for i, reward in enumerate([1.0, 0.0, 0.0])))
    to_datums([made], AlgorithmConfig(advantage_fn=returned))
    scale = 1.0 if returned(torch.tensor([1.0, 0.0, 0.0]))[0] == 1 else 2 / 3
    assert made.advantages == pytest.approx([scale, -scale / 2, -scale / 2])


@pytest.mark.parametrize("wrong", ["10", [1.0], [1.0, NAN], [[1.0], [2.0]], {0: 1.0, 1: 2.0}])
def test_a_wrong_list_is_refused(wrong):
    made = group(*(rollout(str(i), turn([5], [7]), reward=float(i)) for i in range(2)))
    with pytest.raises(ValueError, match="return one finite number per rollout, as a tensor or a list"):
        to_datums([made], AlgorithmConfig(advantage_fn=lambda rewards_G: wrong))
