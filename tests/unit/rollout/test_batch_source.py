"""A batch source of a config's own is made where the loop's source is made, and refused where it cannot work."""

from types import SimpleNamespace

import pytest

import torchtitan_rl.config as rl
from torchtitan_rl.rollout.batch_sources import synchronous_batches
from torchtitan_rl.rollout.batches import BatchPlayer, SynchronousBatches
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.types.run_state import RunState
from torchtitan_rl.validation.batches import check_batches


class Mine(SynchronousBatches):
    pass


def config(**algorithm):
    return rl.RunConfig(
        name="mine", task=LetterSort.Config(), model=rl.ModelConfig(), algorithm=rl.AlgorithmConfig(**algorithm)
    )


def source(config):
    draws = SimpleNamespace(source=None)
    return synchronous_batches(config, SimpleNamespace(), draws, RunState(seed=0), lambda draws, step: None)


def test_the_loop_takes_its_batches_from_the_source_of_the_config():
    made = {}

    def make(player, draws, state):
        made.update(player=player, state=state)
        return Mine(player, draws, state)

    assert type(source(config())) is SynchronousBatches
    assert type(source(config(batch_source=make))) is Mine
    assert isinstance(made["player"], BatchPlayer) and made["state"].seed == 0


def test_a_source_that_a_lag_or_its_parameters_rule_out_is_refused():
    check_batches(config(batch_source=Mine))
    with pytest.raises(ValueError, match="algorithm.max_policy_lag=1 plays them ahead; use max_policy_lag=0"):
        check_batches(config(batch_source=Mine, max_policy_lag=1))
    with pytest.raises(
        ValueError, match="cannot be called with .player, draws, state.: .*; give it these three parameters"
    ):
        check_batches(config(batch_source=lambda player: None))
