"""Influence of batches, with a real Adam over three weights."""

from statistics import fmean

import pytest
import torch

from torchtitan_rl.train.influence import Influence, WeighedBatches, write_influences

BETAS = (0.9, 0.99)


class Trainer:
    """Three weights in two parameters."""

    def __init__(self):
        self.weights = {"a": torch.nn.Parameter(torch.zeros(2)), "b": torch.nn.Parameter(torch.zeros(1, 1))}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=0.1, betas=BETAS)
        self.num_steps = self.version = 0

    def step(self, gradient):
        """`gradient` None: the step is skipped, as for one that is not finite."""
        self.num_steps += 1
        if gradient is None:
            return
        self.version += 1
        self.weights["a"].grad, self.weights["b"].grad = torch.tensor(gradient[:2]), torch.tensor([gradient[2:]])
        self.optimizer.step()

    async def moments(self):
        state = {name: self.optimizer.state[p] for name, p in self.weights.items() if p in self.optimizer.state}
        return {name: (of["exp_avg"].clone(), of["exp_avg_sq"].clone()) for name, of in state.items()}


class Batches:
    """Batches by number."""

    def __init__(self):
        self.number = 0

    async def next_batch(self):
        self.number += 1
        return self.number

    def state_dict(self):
        return {"number": self.number}

    async def cancel(self):
        self.number = -1


async def weighed(of_batches, window, trainer=None):
    """The influences of batches with these gradients, each a list of one gradient per optimizer step."""
    trainer, source = trainer or Trainer(), Batches()
    steps, version = lambda: trainer.num_steps, lambda: trainer.version
    batches = WeighedBatches(source, trainer, steps, version, window=window, beta1=BETAS[0])
    for number, gradients in enumerate(of_batches, start=1):
        assert await batches.next_batch() == number
        for gradient in gradients:
            trainer.step(gradient)
    return batches, await batches.influences()


def random_gradients(number, seed=0):
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("window", [1, 2, 9])
async def test_the_alignment_is_the_mean_cosine_in_adams_scale_with_the_batches_around(window):
    gradients = torch.tensor(random_gradients(7), dtype=torch.float64)
    _, influences = await weighed([[gradient] for gradient in gradients.float().tolist()], window)
    second, directions = torch.zeros(3, dtype=torch.float64), []
    for gradient in gradients:
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        scaled = gradient / second.sqrt().sqrt()
        directions.append(scaled / scaled.norm())
    expected = [
        fmean(float(directions[i] @ directions[j]) for j in range(7) if 0 < abs(i - j) <= window) for i in range(7)
    ]
    assert [influence.alignment for influence in influences] == pytest.approx(expected, abs=1e-5)
    assert [influence.step for influence in influences] == [1, 2, 3, 4, 5, 6, 7]


async def test_a_phase_before_leaves_moments_that_do_not_count():
    trainer = Trainer()
    for gradient in random_gradients(5, seed=1):
        trainer.step(gradient)
    batches, influences = await weighed([[[1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]], [[-1.0, 0.0, 0.0]]], 1, trainer)
    assert [influence.alignment for influence in influences] == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)
    assert [influence.step for influence in influences] == [6, 7, 8]
    assert batches.state_dict() == {"number": 3}
    await batches.cancel()
    assert batches.state_dict() == {"number": -1}


async def test_a_batch_of_several_steps_has_the_sum_of_their_gradients():
    cancelled = [[1.0, 0.0, 0.0], [-BETAS[0], 0.0, 2.0]]  # Adam's average has seen the first of them for one step more
    _, influences = await weighed([cancelled, [[0.0, 0.0, 1.0]] * 2, [[0.0, 0.0, -1.0]] * 2], 1)
    assert [influence.alignment for influence in influences] == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)


async def test_a_batch_that_undoes_stands_out_from_those_around_it():
    of_batches = [[[1.0, 0.1 * noise, 0.1]] for noise, _, _ in random_gradients(30)]
    of_batches[17] = [[-1.0, 0.0, -0.1]]
    _, influences = await weighed(of_batches, window=3)
    assert min(influences, key=lambda influence: influence.deviations).step == 18
    assert influences[17].deviations < -10 and influences[17].alignment < -0.9
    assert all(influence.alignment > 0 for influence in influences if influence.step != 18)


async def test_batches_without_a_gradient_measure_nothing():
    _, influences = await weighed([[[1.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]]], window=2)
    assert [influence.alignment for influence in influences] == pytest.approx([1.0, 0.0, 1.0], abs=1e-5)
    _, alone = await weighed([[[1.0, 0.0, 0.0]]], window=1)
    assert alone == [Influence(step=1, alignment=0.0, deviations=0.0)]


async def test_steps_that_were_skipped_or_left_out_do_not_blur_a_batch():
    """A batch of two steps, one of one step because a filter left a minibatch out, and one whose step was skipped."""
    one, other = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
    _, influences = await weighed([[one, one], [other], [None], [one]], 3)
    assert [influence.alignment for influence in influences] == pytest.approx([0.5, 0.0, 0.0, 0.5], abs=1e-5)


def test_influences_are_written_one_a_line(tmp_path):
    write_influences(tmp_path / "influence.jsonl", [Influence(step=1, alignment=0.5, deviations=-1.0)])
    assert (tmp_path / "influence.jsonl").read_text() == '{"step": 1, "alignment": 0.5, "deviations": -1.0}\n'
