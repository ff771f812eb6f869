"""Influence of batches, with a trainer whose weights are one number."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan_rl.train.influence import Influence, References, WeighedBatches, read_references, write_influences
from torchtitan_rl.types import Datum


class Trainer:
    """Says that every target has the log-probability `weight`."""

    def __init__(self):
        self.weight = 0.0

    async def forward(self, data):
        return SimpleNamespace(policy_logprobs=[torch.full((len(datum),), self.weight) for datum in data])


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


def references(*advantages):
    tokens = torch.tensor([3, 4, 5])
    data = [Datum(tokens=tokens, target_tokens=tokens, loss_inputs={}) for _ in advantages]
    return References(data=data, advantages=[torch.tensor([0.0, a, a]) for a in advantages])


async def weighed(of_batches, updates, window, momentum=0.0):
    """The influences of batches whose gradients change the trainer's weight by `updates`, and again by the momentum of
    the batches before."""
    trainer, moving = Trainer(), 0.0
    by_step = dict(enumerate(of_batches, start=1))
    batches = WeighedBatches(Batches(), trainer, by_step, window=window, momentum=momentum)
    for number, update in enumerate(updates, start=1):
        assert await batches.next_batch() == number
        moving = momentum * moving + update
        trainer.weight += moving
    return batches, await batches.influences()


async def test_the_gain_is_the_change_of_the_objective_of_the_batches_around_and_not_of_the_batch_itself():
    of_batches = [references(1.0, 3.0), references(-2.0), references(4.0)]
    batches, influences = await weighed(of_batches, [0.5, 0.25, -1.0], window=1)
    assert [influence.step for influence in influences] == [1, 2, 3]
    assert [influence.gain for influence in influences] == pytest.approx([0.5 * -2, 0.25 * (2 + 4) / 2, -1.0 * -2])
    _, wider = await weighed(of_batches, [0.5, 0.25, -1.0], window=2)
    assert [influence.gain for influence in wider] == pytest.approx([0.5 * 1, 0.25 * 3, -1.0 * 0.0])
    _, with_momentum = await weighed(of_batches, [0.5, 0.25, -1.0], window=1, momentum=0.9)
    assert [influence.gain for influence in with_momentum] == pytest.approx([-1.0, 0.75, 2.0], abs=1e-6)
    assert batches.state_dict() == {"number": 3}
    await batches.cancel()
    assert batches.state_dict() == {"number": -1}


async def test_a_batch_that_undoes_stands_out_from_those_around_it():
    of_batches = [references(1.0) for _ in range(30)]
    updates = [0.1 + 0.001 * (i % 5) for i in range(30)]
    updates[17] = -0.1
    _, influences = await weighed(of_batches, updates, window=3)
    assert min(influences, key=lambda influence: influence.deviations).step == 18
    assert influences[17].deviations < -50 and all(abs(i.deviations) < 3 for i in influences if i.step != 18)


async def test_batches_without_a_signal_measure_nothing():
    silent = References(data=[], advantages=[])
    _, influences = await weighed([references(1.0), silent, references(2.0)], [0.5, 0.5, 0.5], window=1)
    assert [influence.gain for influence in influences] == [0.0, 0.75, 0.0]
    _, alone = await weighed([references(1.0)], [0.5], window=1)
    assert alone == [Influence(step=1, gain=0.0, deviations=0.0)]


def test_references_are_the_recorded_sequences_that_teach(tmp_path, monkeypatch):
    def record(step, advantage, targets=(4, 5)):
        sequence = {"tokens": [3, 4], "target_tokens": targets, "loss_mask": [0, 1], "advantages": [advantage] * 2}
        return {"step": step, "sequences": [sequence]}

    records = [record(1, 1.0), record(2, 0.0), record(2, -2.0), record(3, 1.0, targets=None), record(4, 1.0)]
    monkeypatch.setattr("torchtitan_rl.train.influence.read_rollouts", lambda run, columns: iter(records))
    run = SimpleNamespace(path=tmp_path)
    by_step = read_references(run, first=1, last=3)
    assert list(by_step) == [2, 3] and by_step[3].data == []
    (advantages,) = by_step[2].advantages
    assert advantages.tolist() == [0.0, -2.0] and by_step[2].data[0].target_tokens.tolist() == [4, 5]
    with pytest.raises(ValueError, match="have no training sequences; a run keeps them with"):
        read_references(run, first=2, last=3)


def test_influences_are_written_one_a_line(tmp_path):
    write_influences(tmp_path / "influence.jsonl", [Influence(step=1, gain=0.5, deviations=-1.0)])
    assert (tmp_path / "influence.jsonl").read_text() == '{"step": 1, "gain": 0.5, "deviations": -1.0}\n'
