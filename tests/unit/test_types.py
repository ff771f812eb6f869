"""What a task and a datum refuse, how a loss reads its inputs, and when a completion was cut off."""

import math

import pytest
import torch

from tests.kit.refusal import refusal
from torchtitan_rl.types import Completion, Datum, LossInputs, Task


def datum(length=3, targets=3, **loss_inputs):
    return Datum(tokens=torch.arange(length), target_tokens=torch.arange(targets), loss_inputs=loss_inputs)


def test_a_task_whose_id_is_no_text_is_refused():
    assert refusal(Task, id=17, prompt="") == (
        "task.id=17: is no text; give each task a text of its own, such as id='17'"
    )


def test_the_length_of_a_datum_is_its_number_of_tokens():
    assert len(datum(token_weights=torch.ones(3), loss_mask=torch.ones(3))) == 3


def test_an_empty_datum_is_refused():
    assert refusal(datum, length=0, targets=0) == (
        "datum.tokens=[]: a datum needs at least one token; drop it before training"
    )


def test_tensors_of_unequal_length_are_refused_by_name():
    assert refusal(datum, targets=2) == "datum.target_tokens: has 2 entries where tokens has 3; give one per token"
    assert refusal(datum, token_weights=torch.ones(3), advantages=torch.ones(4)) == (
        "datum.advantages: has 4 entries where tokens has 3; give one per token"
    )


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_numbers_that_are_not_finite_are_refused_by_name_and_value(value, shown):
    assert refusal(datum, token_weights=torch.ones(3), sampling_logprobs=torch.tensor([-1.0, value, -2.0])) == (
        f"datum.sampling_logprobs={shown}: is not finite; mask such tokens out and give them a finite value"
    )


def test_several_targets_and_numbers_of_a_token_are_rows():
    targets_TK = torch.zeros(3, 2, dtype=torch.int64)
    for weights in (torch.ones(3), torch.ones(3, 2)):
        made = Datum(
            tokens=torch.arange(3),
            target_tokens=targets_TK,
            loss_inputs={"token_weights": weights, "loss_mask": torch.ones(3), "teacher_hidden": torch.ones(3, 7)},
        )
        assert len(made) == 3


@pytest.mark.parametrize(
    ("loss_inputs", "message"),
    [
        ({"loss_mask": torch.ones(3, 2)}, "datum.loss_mask: has shape (3, 2); give (T,)"),
        ({"teacher_hidden": torch.ones(3, 2, 2)}, "datum.teacher_hidden: has shape (3, 2, 2); give (T,) or (T, n)"),
        ({"teacher_hidden": torch.ones(3, 0)}, "datum.teacher_hidden: has shape (3, 0); give (T,) or (T, n)"),
        (
            {"token_weights": torch.ones(3, 2)},
            "datum.token_weights: has shape (3, 2) where target_tokens has (3,); give one per token, or one per target",
        ),
    ],
)
def test_other_shapes_are_refused_by_name(loss_inputs, message):
    assert refusal(datum, **loss_inputs) == message


def test_a_loss_reads_the_data_as_attributes():
    weights_T = torch.tensor([0.25, 0.75])
    inputs = LossInputs(
        policy_logprobs=torch.zeros(2),
        entropy=torch.ones(2),
        datum=torch.zeros(2),
        num_datums=1,
        tensors={"token_weights": weights_T, "loss_mask": torch.ones(2)},
    )
    assert inputs.token_weights is weights_T
    assert inputs.entropy.tolist() == [1.0, 1.0]  # a field of the class, not one of the data


def test_a_loss_input_that_is_not_there_is_an_attribute_error_that_says_what_is():
    inputs = LossInputs(
        policy_logprobs=torch.zeros(2),
        entropy=torch.ones(2),
        datum=torch.zeros(2),
        num_datums=1,
        tensors={"token_weights": torch.ones(2), "loss_mask": torch.ones(2)},
    )
    with pytest.raises(AttributeError) as caught:
        inputs.advantages  # noqa: B018
    assert str(caught.value) == (
        "loss input 'advantages': the data carry only ['loss_mask', 'token_weights']; fill it where datums are built"
    )
    assert not hasattr(inputs, "advantages")  # which needs an AttributeError, not a KeyError


@pytest.mark.parametrize(("finish_reason", "truncated"), [("length", True), ("stop", False)])
def test_a_completion_that_ran_into_the_token_limit_is_truncated(finish_reason, truncated):
    completion = Completion(tokens=[4], logprobs=[-0.5], policy_versions=[0], finish_reason=finish_reason)
    assert completion.truncated is truncated
