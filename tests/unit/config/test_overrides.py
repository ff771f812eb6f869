"""Overrides: what `show` prints is accepted back, parts are switched on, functions are named."""

import dataclasses
import functools
import json
import math
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from tests.unit.config.test_load import overridden
from torchtitan_rl.algorithm import advantages, losses, reductions
from torchtitan_rl.cli.show import show
from torchtitan_rl.config.derive import longest_rollout, open_fields, settled
from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.resolve import flat, function_name, resolved
from torchtitan_rl.config.run import RoleConfig, RunConfig
from torchtitan_rl.config.values import parsed
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.validation.run import validate

CONFIGS = Path(__file__).parents[3] / "configs"


def shown(config, capsys):
    """The flags that `show` prints, as the words of a shell line."""
    show(config)
    return [word for line in capsys.readouterr().out.splitlines() if line.startswith("--") for word in split(line)]


def split(line):
    return shlex.split(line, comments=True)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_what_show_prints_is_the_same_in_every_process_and_changes_nothing(path, capsys):
    config, again = load_config(str(path)), load_config(str(path))
    words = shown(config, capsys)
    assert shown(again, capsys) == words and not any(" at 0x" in word for word in words)
    for word in words:  # also where another value stood before
        if re.fullmatch(r"[\w.]+:[\w.]+(\(.*\))?", word):
            assert function_name(parsed(Callable, "--function", [word])) == word
    apply_overrides(config, words)
    assert resolved(config) == resolved(settled(again))


def test_what_show_prints_of_one_config_makes_another_the_same(capsys):
    config = run_config()
    config.name, config.sampling.stop = 'it\'s "x"\n', ["a b", "'", "--c", "\n"]
    config.sampling.stop_token_ids = [3, -4]
    config.algorithm.advantage_fn = functools.partial(advantages.grpo, std="none")
    config.algorithm.reduction = functools.partial(reductions.constant_length, length=12)
    config.algorithm.loss_fn, config.algorithm.loss_config = losses.cispo, {"clip_high": 3.0}
    config.trainer.lora, config.trainer.training.max_norm = LoRAConfig(rank=4, target_modules=["o_proj"]), None
    config.roles.reference = RoleConfig()
    other = run_config()
    other.algorithm.loss_config = {}
    apply_overrides(other, shown(config, capsys))
    same, made = dict(flat(settled(config))), dict(flat(other))
    for name in ("algorithm.advantage_fn", "algorithm.reduction"):
        one, two = same.pop(name), made.pop(name)
        assert (one.func, one.keywords) == (two.func, two.keywords)
    assert made == same


def test_functions_by_module_and_by_file(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text("def ones(task, completions):\n    return [1.0 for _ in completions]\n\nFACTOR = 3\n")
    config = overridden("--task.reward", f"{file}:ones", "--algorithm.loss-fn", "torchtitan_rl.algorithm.losses:gspo")
    assert config.task.reward(None, ["a", "b"]) == [1.0, 1.0] and config.algorithm.loss_fn is losses.gspo
    assert overridden("--task.reward", "None").task.reward is None
    for text, what in (
        ("ppo", "names no function; write module:name or file.py:name, such as torchtitan_rl.algorithm.surrogate:ppo"),
        ("torchtitan_rl.algorithm.losses:pppo", "torchtitan_rl.algorithm.losses has no pppo; did you mean ppo?"),
        ("no_such:ppo", "No module named 'no_such'; write module:name or file.py:name, such as"),
        (f"{file}:FACTOR", "is a int; name a function, such as"),
        ("nowhere.py:ppo", "there is no file nowhere.py; give the path of a Python file"),
        ("torchtitan_rl.algorithm.surrogate:ppo(clip_low=x)", "its arguments are no literals"),
        ("torchtitan_rl.algorithm.surrogate:ppo(clip_low=)", "its arguments are no literals"),
        ("torchtitan_rl.algorithm.surrogate:ppo(a=function(x))", "its arguments are no literals"),
    ):
        message = refusal(apply_overrides, run_config(), ["--algorithm.loss-fn", text])
        assert message.startswith(f"--algorithm.loss-fn={text}: {what}")


def test_booleans_without_a_value():
    assert overridden("--algorithm.filters.zero-variance").algorithm.filters.zero_variance is True
    assert overridden("--weight-sync.no-verify").weight_sync.verify is False
    assert overridden("--weight_sync.no_verify").weight_sync.verify is False
    assert overridden("--no-weight-sync.verify", "--seed", "3").weight_sync.verify is False
    assert refusal(apply_overrides, run_config(), ["--no-seed"]).startswith("--no-seed: there is no such field")


def test_a_switch_that_may_be_none_is_a_switch():
    for words, value in (
        (["--generator.enforce-eager"], True),
        (["--no-generator.enforce-eager"], False),
        (["--generator.enforce-eager", "true"], True),
        (["--generator.enforce-eager", "None"], None),
    ):
        assert overridden(*words).generator.enforce_eager is value


def test_a_text_of_a_list_keeps_its_blanks():
    for words, stop in (
        (["Final answer:"], ["Final answer:"]),
        (["\n"], ["\n"]),
        (["a b", "c"], ["a b", "c"]),
        (["['[END]']"], ["[END]"]),
    ):
        assert overridden("--sampling.stop", *words).sampling.stop == stop
    message = refusal(apply_overrides, run_config(), ["--sampling.stop", "[END]"])
    assert message.endswith("; a text that begins with a bracket is written \"['[END]']\"")
    assert overridden("--sampling.stop-token-ids", "3 4").sampling.stop_token_ids == [3, 4]
    assert overridden("--trainer.optimizer.betas", "0.9 0.99").trainer.optimizer.betas == (0.9, 0.99)


def test_a_choice_that_does_not_exist_is_refused_with_the_choices():
    message = refusal(apply_overrides, run_config(), ["--algorithm.kl-in", "rewards"])
    assert message == "--algorithm.kl-in=rewards: there is no such choice; use one of loss, reward, return"


@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_an_argument_without_bound_is_read_as_python_prints_it(number):
    text = f"torchtitan_rl.algorithm.surrogate:ppo(dual_clip={number})"
    loss_fn = overridden("--algorithm.loss-fn", text).algorithm.loss_fn
    assert loss_fn.keywords == {"dual_clip": number} and function_name(loss_fn) == text


def test_a_role_begins_with_the_policys_trainer():
    config = overridden(
        "--roles.critic.trainer.optimizer.lr", "1e-5", "--trainer.parallelism.data-parallel-shard-degree", "2",
        "--trainer.lora.rank", "8", "--roles.reference", "True",
    )  # fmt: skip
    critic, reference = config.roles.critic.trainer, config.trainers()["reference"][0]
    assert (critic.optimizer.lr, config.trainer.optimizer.lr, reference.optimizer.lr) == (1e-5, 1e-3, 1e-3)
    assert critic.parallelism.data_parallel_shard_degree == reference.parallelism.data_parallel_shard_degree == 2
    assert critic.lora is reference.lora is None and config.roles.reference == RoleConfig()
    critic.lora = config.trainer.lora = None
    validate(config)
    assert overridden("--roles.reference", "True", "--roles.reference", "None").roles.reference is None


def test_a_part_without_defaults_is_refused_with_what_it_needs():
    config = run_config()
    config.model = ModelConfig(flavor="0.6B")
    message = refusal(apply_overrides, config, ["--model.shape.dim", "32"])
    assert message.startswith("--model.shape.dim=32: a DecoderShape is None in this config and has no defaults")
    assert config.model.shape is None


def test_all_near_names_are_offered():
    message = refusal(apply_overrides, run_config(), ["--controller.eval-task", "1"])
    assert "--controller.eval-tasks" in message and " or " in message


def test_lengths_follow_from_the_sampling_limits(capsys):
    config = run_config()  # at most 8 + 12 tokens
    config.trainer, config.generator.max_model_len = TrainerConfig(), 0
    config.roles.critic = RoleConfig()
    validate(config)
    made = settled(config)
    assert (made.trainer.training.seq_len, made.roles.critic.trainer.training.seq_len) == (20, 20)
    assert made.generator.max_model_len == 20 and config.generator.max_model_len == 0
    assert settled(made) is made and not open_fields(made)
    show(config)
    assert "--generator.max-model-len 20  # from sampling.max_prompt_tokens + max_tokens" in capsys.readouterr().out
    assert open_fields(config)["trainer.training.seq_len"] == "from sampling.max_prompt_tokens + max_tokens"
    config.sampling.max_rollout_tokens = 15  # less than a prompt and a completion
    assert open_fields(config)["trainer.training.seq_len"] == "from sampling.max_prompt_tokens + max_tokens"
    config.sampling.max_rollout_tokens = 30
    assert open_fields(config)["trainer.training.seq_len"] == "from sampling.max_rollout_tokens"
    assert settled(config).trainer.training.seq_len == settled(config).generator.max_model_len == 30
    config.sampling.max_tokens = 100
    assert refusal(validate, config) == (
        "sampling.max_prompt_tokens + max_tokens = 108: exceed the model's max_seq_len=64; lower one of them"
    )


def test_a_teacher_of_self_distillation_has_room_for_two_rollouts_as_far_as_the_model_has_positions():
    config = load_config(str(CONFIGS / "self_distill.py"))
    config.generator.max_model_len, longest = 0, longest_rollout(config)[0]
    for positions, room in ((4 * longest, 2 * longest), (longest + 3, longest + 3)):
        config.model.shape = dataclasses.replace(config.model.shape, max_seq_len=positions)
        assert settled(config).generator.max_model_len == room
    source = open_fields(config)["generator.max_model_len"]
    assert source.startswith("from the model's positions, fewer than twice sampling.max_prompt_tokens")


async def my_workflow(task, policy, *, rollout_id, seed):
    raise NotImplementedError


def test_lengths_for_a_workflow_fit_the_models(tmp_path):
    config = run_config()  # a model of 64 positions
    config.trainer, config.generator.max_model_len, config.algorithm.workflow = TrainerConfig(), 0, my_workflow
    validate(config)
    assert settled(config).trainer.training.seq_len == settled(config).generator.max_model_len == 64
    assert open_fields(config)["generator.max_model_len"] == "from the model's positions, for a workflow's own prompts"
    config.model.shape.max_seq_len = 4096
    assert settled(config).trainer.training.seq_len == 2048
    assert open_fields(config)["generator.max_model_len"] == "from a workflow's own prompts"
    config.roles.reference = RoleConfig(model=ModelConfig(assets=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(config.model.shape.to_hf(1, 0) | {"max_position_embeddings": 100}))
    assert settled(config).roles.reference.trainer.training.seq_len == settled(config).generator.max_model_len == 100


@pytest.mark.parametrize(
    "replicas, restarts, asked, spares", [(1, 3, None, 0), (2, 3, None, 1), (2, 0, None, 0), (2, 3, 0, 0), (1, 3, 2, 2)]
)
def test_several_replicas_that_are_replaced_have_a_spare(replicas, restarts, asked, spares):
    config = run_config()
    config.generator.num_replicas, config.generator.max_replica_restarts = replicas, restarts
    config.generator.num_spares = asked
    validate(config)
    assert settled(config).generator.num_spares == spares


def test_explicit_lengths_stay():
    config = run_config()
    config.generator.num_spares, config.generator.record_routing = 0, False
    assert settled(config) is config
    defaults = RunConfig(name="", task=LetterSort.Config(), model=ModelConfig())
    assert settled(defaults).trainer.training.seq_len == 1024


def test_a_module_beside_the_config_is_found_and_hides_no_package(tmp_path, monkeypatch):
    """In processes that start later, too."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TORCHTITAN_RL_PATH", "")
    monkeypatch.delitem(sys.modules, "beside_the_config", raising=False)
    (tmp_path / "beside_the_config.py").write_text(
        "def ones(task, completions):\n    return [1.0 for _ in completions]\n"
    )
    (tmp_path / "numpy.py").write_text("raise ImportError('hides numpy')\n")
    (tmp_path / "train.py").write_text(
        "import beside_the_config\nfrom torchtitan_rl.config import ModelConfig, RunConfig\n"
        "from torchtitan_rl.tasks.letter_sort import LetterSort\n\ndef config():\n"
        "    task = LetterSort.Config(reward=beside_the_config.ones)\n"
        "    return RunConfig(name='x', task=task, model=ModelConfig())\n"
    )
    reward = load_config(str(tmp_path / "train.py")).task.reward
    program = (
        "import sys, pickle, torchtitan_rl, numpy; sys.path.index(numpy.__file__.rsplit('/', 2)[0]);"
        f"print(pickle.loads({pickle.dumps(reward)!r})(None, 'ab'))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60) == "[1.0, 1.0]\n"
