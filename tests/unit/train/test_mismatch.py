"""Samples of a run's tokens out of rollouts and records, their scores, and labels that are wrong."""

import numpy as np
import pytest
import torch

from torchtitan_rl.mismatch.causes import Position
from torchtitan_rl.mismatch.gap import LIMITS
from torchtitan_rl.mismatch.scores import Rescorer, VersionGone, samples_of
from torchtitan_rl.mismatch.search import wrong_labels
from torchtitan_rl.record.records import rollout_records
from torchtitan_rl.tools.explain_mismatch import samples_of_record
from torchtitan_rl.types import Completion, Datum, Rollout, RolloutGroup, Scores, Task, Turn

FLOAT32 = LIMITS["float32"]


def turn(prompt: list[int], tokens: list[int], versions: list[int] | None = None) -> Turn:
    logprobs = [-float(token) / 10 for token in tokens]
    versions = versions or [3] * len(tokens)
    sampled = Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, finish_reason="stop")
    return Turn(prompt_tokens=prompt, completion=sampled)


def two_sequences() -> Rollout:
    """Two turns that extend each other, and one that does not."""
    turns = [turn([1, 2], [5, 6]), turn([1, 2, 5, 6, 3], [7], [4]), turn([9], [8, 8])]
    return Rollout(id="0/0/0", task=Task(id="t", prompt="p"), turns=turns, reward=1.0)


class Scorer:
    """A generator whose score of every token is minus the number of tokens that it has read before it."""

    def __init__(self):
        self.read, self.now = [], 3

    def loaded_version(self):
        return self.now

    async def score(self, tokens, *, cached=False):
        self.read.append(tokens)
        scores = Scores(-float(place) for place in range(1, len(tokens)))
        scores.policy_version = 3
        return scores

    async def score_top(self, tokens, top_k):
        return torch.zeros(len(tokens) - 1, top_k, dtype=torch.int64), torch.full((len(tokens) - 1, top_k), -1.0)


def test_turns_that_extend_each_other_are_one_sample():
    first, second = samples_of(two_sequences())
    assert first.tokens == [1, 2, 5, 6, 3, 7] and first.place_N.tolist() == [2, 3, 5]
    assert first.turn_N.tolist() == [0, 0, 1] and first.version_N.tolist() == [3, 3, 4]
    assert first.reported_N.tolist() == [-0.5, -0.6, -0.7]
    assert second.tokens == [9, 8, 8] and second.place_N.tolist() == [1, 2] and second.turn_N.tolist() == [2, 2]


async def test_scores_are_those_of_the_sampled_tokens_also_without_a_part_of_the_prompt():
    scorer = Scorer()
    rescorer, samples = Rescorer(scorer, 1.0, 16), samples_of(two_sequences())[:1]
    assert (await rescorer.scores(samples))[0].tolist() == [-2, -3, -5]
    assert (await rescorer.scores(samples, without=1))[0].tolist() == [-1, -2, -4]
    assert (await rescorer.scores(samples, without=-1))[0].tolist() == [-1, -2, -4]
    assert scorer.read == [[1, 2, 5, 6, 3, 7], [2, 5, 6, 3, 7], [1, 5, 6, 3, 7]]


async def test_scores_name_the_version_that_answered_and_there_are_none_where_another_one_did():
    scorer = Scorer()
    rescorer, samples = Rescorer(scorer, 1.0, 16), samples_of(two_sequences())
    version, scores = await rescorer.served(samples)
    assert version == 3 and [len(score_N) for score_N in scores] == [3, 2]
    scorer.now = 2  # new weights come after the question
    assert await rescorer.served(samples) is None
    with pytest.raises(VersionGone, match="policy_version=2: new weights came"):
        await rescorer.of_version(2).scores(samples)
    scorer.now = None  # replicas differ
    assert await rescorer.served(samples) is None


async def test_another_temperature_is_computed_from_whole_distributions():
    rescorer, samples = Rescorer(Scorer(), 0.5, 4), samples_of(two_sequences())[:1]
    expected = np.array([-2.0, -3.0, -5.0]) / 0.5 - np.log(4 * np.exp(-1 / 0.5))
    assert (await rescorer.scores(samples))[0] == pytest.approx(expected)
    assert isinstance(await rescorer.positions(samples), Position)


def test_records_give_the_samples_that_rollouts_gave():
    rollout, trained = two_sequences(), []
    for sample in samples_of(rollout):
        tokens = torch.tensor(sample.tokens)
        mask = torch.zeros(len(tokens) - 1)
        mask[sample.place_N - 1] = 1
        inputs = {"loss_mask": mask, "token_weights": mask}
        datum = Datum(tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs=inputs)
        trained.append((datum, -torch.arange(1.0, len(tokens))))
    (record,) = rollout_records([RolloutGroup(id="0/0", rollouts=[rollout])], trained, str)
    for one, other in zip(samples_of(rollout), samples_of_record(record), strict=True):
        assert one.tokens == other.tokens
        for name in ("place_N", "turn_N", "version_N", "reported_N"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
        assert other.trainer_N.tolist() == (-one.place_N).tolist()


def test_sequences_of_some_turns_are_found_where_others_did_not_train():
    """Of a main branch and a sub-agent between its turns, one trained alone."""
    rollout = two_sequences()
    main, sub_agent = samples_of(rollout)
    rollout.turns = [rollout.turns[0], rollout.turns[2], rollout.turns[1]]

    def record_of(sample, turns):
        tokens = torch.tensor(sample.tokens)
        inputs = {"loss_mask": torch.ones(len(tokens) - 1), "token_weights": torch.ones(len(tokens) - 1)}
        datum = Datum(tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs=inputs, turns=turns)
        trained = [(datum, -torch.arange(1.0, len(tokens)))]
        (record,) = rollout_records([RolloutGroup(id="0/0", rollouts=[rollout])], trained, str)
        return record

    for turns in ([(0, 1, 2), (2, 4, 1)], None):  # None: of an earlier version
        (found,) = samples_of_record(record_of(main, turns))
        assert found.place_N.tolist() == [2, 3, 5] and found.turn_N.tolist() == [0, 0, 2]
        assert found.reported_N.tolist() == [-0.5, -0.6, -0.7] and found.version_N.tolist() == [3, 3, 4]
    for turns in ([(1, 0, 2)], None):
        (found,) = samples_of_record(record_of(sub_agent, turns))
        assert found.place_N.tolist() == [1, 2] and found.turn_N.tolist() == [1, 1]


def test_a_record_of_a_rollout_that_did_not_train_gives_none():
    (record,) = rollout_records([RolloutGroup(id="0/0", rollouts=[two_sequences()])], [], str)
    assert samples_of_record(record) == []


def test_labels_are_wrong_where_another_version_reproduces_the_tokens_and_versions_differ():
    (sample,) = samples_of(Rollout(id="0", task=Task(id="t", prompt="p"), turns=[turn([1, 2], list(range(3, 13)))]))
    sample.ended_N, sample.ended_version = sample.reported_N + 1e-7, 4
    found = wrong_labels([sample], FLOAT32, moved=0.1)
    assert found.name == "label" and "10 of 10 tokens name version 3 where version 4" in found.words
    assert wrong_labels([sample], FLOAT32, moved=1e-5) is None  # versions that do not differ cannot be told apart
    sample.ended_version = 3
    assert wrong_labels([sample], FLOAT32, moved=0.1) is None
    sample.ended_N, sample.ended_version = sample.reported_N + 0.01, 4
    assert wrong_labels([sample], FLOAT32, moved=0.1) is None  # an older version sampled them, as they say
