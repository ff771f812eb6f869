"""Which sequence of the trainer belongs to which sample of a rollout."""

import numpy as np
import torch

from torchtitan_rl.mismatch.scores import add_trainer, samples_of
from torchtitan_rl.types import Completion, Datum, Rollout, Task, Turn


def turn(prompt, tokens):
    num = len(tokens)
    completion = Completion(tokens=tokens, logprobs=[-1.0] * num, policy_versions=[0] * num, finish_reason="stop")
    return Turn(prompt_tokens=prompt, completion=completion)


def trained(tokens, logprobs):
    tokens_T = torch.tensor(tokens)
    return Datum(tokens=tokens_T[:-1], target_tokens=tokens_T[1:], loss_inputs={}), torch.tensor(logprobs)


def test_sequences_that_a_credit_fn_left_out_get_no_log_probabilities_of_others():
    """Two branches of equal length, of which only the second trains."""
    rollout = Rollout(id="0/0/0", task=Task(id="0", prompt=""), turns=[turn([1, 2], [3, 4]), turn([1, 2], [5, 6])])
    left_out, kept = samples_of(rollout)
    add_trainer([left_out, kept], [trained([1, 2, 5, 6], [-0.1, -0.2, -0.3])])
    assert np.isnan(left_out.trainer_N).all()
    np.testing.assert_allclose(kept.trainer_N, [-0.2, -0.3], rtol=1e-6)
