"""A config read back from what a run wrote down."""

import importlib
import json
from functools import partial

import pytest

from tests.kit.run_config import run_config
from torchtitan_rl.algorithm import losses
from torchtitan_rl.algorithm.corrections import both, opsm, truncated_token
from torchtitan_rl.algorithm.reductions import constant_length
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.recorded import recorded_config
from torchtitan_rl.config.resolve import function_name, resolved
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.rewards import Rewards


def test_a_config_reads_back_with_tuples_and_functions_with_arguments():
    config = settled(run_config())
    config.algorithm.reduction = partial(constant_length, length=12)
    config.trainer.optimizer.betas = (0.9, 0.99)
    back, changed = recorded_config(json.loads(json.dumps(resolved(config))), "run")
    assert changed == {} and resolved(back) == resolved(config)
    assert back.trainer.optimizer.betas == (0.9, 0.99) and isinstance(back.trainer.optimizer.betas, tuple)
    assert back.algorithm.reduction.keywords == {"length": 12} and back.task == config.task


def test_a_bound_of_infinity_in_a_partial_reads_back():
    config = settled(run_config())
    config.algorithm.loss_fn = partial(losses.ppo, dual_clip=float("inf"))
    back, changed = recorded_config(json.loads(json.dumps(resolved(config))), "run")
    assert changed == {} and back.algorithm.loss_fn.keywords == {"dual_clip": float("inf")}


def test_a_changed_argument_of_a_function_is_a_changed_source_unless_an_earlier_version_did_not_record_it():
    config = settled(run_config())
    config.algorithm.correction_fn = partial(both, first=truncated_token, second=opsm)
    plain = json.loads(json.dumps(resolved(config)))
    recorded = plain["algorithm"]["correction_fn"]
    assert recorded_config(plain, "run")[1] == {} and len(recorded["argument_sha256"]) == 2
    hashes = recorded["argument_sha256"]
    recorded["argument_sha256"] = [hashes[0], "0"]
    back, changed = recorded_config(plain, "run")
    assert changed == {"algorithm.correction_fn.argument_sha256": ([hashes[0], "0"], hashes)}
    assert back.algorithm.correction_fn.keywords == {"first": truncated_token, "second": opsm}
    del recorded["argument_sha256"]
    assert recorded_config(plain, "run")[1] == {}


def in_turn(inputs, functions, names=(), weights=None):
    """A loss, for a partial with functions in its arguments."""


def test_functions_in_lists_tuples_and_dictionaries_of_a_partial_are_read_back_and_hashed():
    config = settled(run_config())
    arguments = {"functions": [losses.ppo, opsm], "names": (both,), "weights": {"a": 1.5, "b": truncated_token}}
    config.algorithm.loss_fn = partial(in_turn, **arguments)
    plain = json.loads(json.dumps(resolved(config)))
    back, changed = recorded_config(plain, "run")
    assert changed == {} and back.algorithm.loss_fn.keywords == arguments
    hashes = plain["algorithm"]["loss_fn"]["argument_sha256"]
    assert len(set(hashes)) == 4 and "" not in hashes


def test_a_method_of_an_object_is_recorded_as_one_and_is_not_read_back_as_the_function_of_its_class():
    config = settled(run_config())
    config.task.reward = Rewards({"own": (config.task.build().reward, 1.0)})
    plain = json.loads(json.dumps(resolved(config)))
    name = "torchtitan_rl.tasks.letter_sort:LetterSort.reward"
    assert function_name(LetterSort.reward) == name
    with pytest.raises(ValueError, match=f"run={name} of an object: the object was made where the config was"):
        recorded_config(plain, "run")


def test_arguments_without_functions_are_named_as_python_prints_them():
    arguments = ([1, 2.5], (1,), (), ("a", None), {"b": [True]}, float("inf"))
    assert function_name(partial(in_turn, *arguments)) == f"{__name__}:in_turn({', '.join(map(repr, arguments))})"


def test_what_cannot_be_read_back_is_a_sentence():
    plain = json.loads(json.dumps(resolved(settled(run_config()))))
    with pytest.raises(ValueError, match="run: was written by another version .*; use that version"):
        recorded_config(plain | {"gone": 1}, "run")
    with pytest.raises(ValueError, match="run: is not the config of a run"):
        recorded_config({"name": "x"}, "run")


@pytest.mark.parametrize(
    "name",
    [
        "config.algorithm:AlgorithmConfig",
        "config.meshes:GeneratorConfig",
        "config.meshes:TrainerConfig",
        "config.model:ModelConfig",
        "config.record:RecordConfig",
        "config.run:RunConfig",
        "config.run:SamplingConfig",
        "config.sampling:AlteredSampling",
        "config.stopping:StopConfig",
        "families.qwen3:Qwen3Shape",
        "tasks.letter_sort:LetterSort.Config",
    ],
)
def test_recorded_configs_name_their_classes_so(name):
    """A run of an earlier version names its classes by module: one that moves makes it unreadable."""
    module, _, qualname = name.partition(":")
    recorded = getattr(importlib.import_module(f"torchtitan_rl.{module}"), qualname.partition(".")[0])
    assert f"{recorded.__module__}:{recorded.__qualname__}".startswith(f"torchtitan_rl.{name.partition('.Config')[0]}")
