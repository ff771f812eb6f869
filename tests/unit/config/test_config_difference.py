"""Which changes of a config a resumed run may have."""

import dataclasses
import json
from pathlib import Path

import pytest

from torchtitan_rl.config.config_difference import changes_future_only, differences, is_harmless
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.resolve import flat, resolved
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.tasks.mixture import Mixture

ROOT = Path(__file__).parents[3]


def config():
    return load_config(str(ROOT / "configs" / "ppo_critic.py"))


def changed(change) -> dict:
    before, now = config(), config()
    change(now)
    return differences(json.loads(json.dumps(resolved(before))), resolved(now))


def test_a_fork_may_compute_its_logits_otherwise_and_has_the_models_sizes():
    assert changes_future_only("model.float32_head") and not is_harmless("model.float32_head")
    assert not changes_future_only("model.shape.dim")


def test_equal_configs_do_not_differ():
    assert changed(lambda now: None) == {}


@pytest.mark.parametrize(
    ("path", "value", "harmless"),
    [
        ("controller.num_steps", 400, True),
        ("controller.checkpoint_every", 10, True),
        ("output_dir", "elsewhere", True),
        ("trainer.parallelism.tensor_parallel_degree", 2, True),
        ("trainer.optimizer.lr", 1e-5, True),
        ("trainer.max_tokens_per_microbatch", 512, True),
        ("roles.critic.trainer.parallelism.data_parallel_shard_degree", 2, True),
        ("generator.num_replicas", 2, True),
        ("generator.dtype", "bfloat16", False),
        ("trainer.training.dtype", "bfloat16", False),
        ("seed", 1, False),
        ("algorithm.group_size", 4, False),
        ("sampling.max_tokens", 14, False),
        ("task.max_letters", 7, False),
        ("model.shape.n_layers", 2, False),
        ("supervised.lr", 1e-4, False),
    ],
)
def test_layout_and_cadence_may_change_and_data_and_model_may_not(path, value, harmless):
    def change(now):
        *parents, last = path.split(".")
        for name in parents:
            now = getattr(now, name)
        assert getattr(now, last) != value
        setattr(now, last, value)

    assert [*changed(change)] == [path] and is_harmless(path) == harmless


def test_a_role_that_takes_over_the_trainer_of_the_policy_may_change_with_it():
    """A reward model, and every other role, whose trainer is a copy of the policy's."""
    before, now = (load_config(str(ROOT / "configs" / "reward_model.py")) for _ in range(2))
    now.trainer.optimizer.lr, now.trainer.parallelism.tensor_parallel_degree = 1e-5, 2
    for of_run in (before, now):
        of_run.roles.reward_model.trainer = None
        of_run.roles.reference, of_run.roles.critic, of_run.roles.teacher = (
            RoleConfig(model=of_run.model) for _ in range(3)
        )
    roles = [field.name for field in dataclasses.fields(now.roles) if field.default is None]
    assert sorted(roles) == sorted(now.roles.configured())
    found = differences(json.loads(json.dumps(resolved(settled(before)))), resolved(settled(now)))
    changed = ("optimizer.lr", "parallelism.tensor_parallel_degree")
    trainers = ["trainer", *(f"roles.{role}.trainer" for role in roles)]
    assert sorted(found) == sorted(f"{trainer}.{field}" for trainer in trainers for field in changed)
    assert all(map(is_harmless, found))


def test_a_part_that_is_switched_off_is_a_difference_of_each_of_its_fields():
    def change(now):
        now.roles.critic = None

    found = changed(change)
    assert "roles.critic.trainer.training.seq_len" in found
    assert not all(map(is_harmless, found))


def test_a_field_of_a_newer_version_is_no_difference_and_a_section_switched_on_is():
    before, now = json.loads(json.dumps(resolved(config()))), config()
    del before["algorithm"]["on_rollout_failure"]
    before["roles"]["critic"] = None
    found = differences(before, resolved(now))
    assert "algorithm.on_rollout_failure" not in found
    assert found["roles.critic.trainer.training.seq_len"] == (None, now.roles.critic.trainer.training.seq_len)


def test_a_key_that_is_added_to_a_dictionary_of_arguments_is_a_difference_and_so_is_a_new_task_of_a_mixture():
    before, now = config(), config()
    before.algorithm.loss_config, now.algorithm.loss_config = {"clip_low": 0.2}, {"clip_low": 0.2, "dual_clip": 3.0}
    before.task, now.task = Mixture.Config(tasks={"x": now.task}), Mixture.Config(tasks={"x": now.task, "y": now.task})
    found = differences(json.loads(json.dumps(resolved(before))), resolved(now))
    assert found["algorithm.loss_config.dual_clip"] == (None, 3.0) and found["task.tasks.y.max_letters"] == (None, 6)
    assert all(path.startswith(("algorithm.loss_config.dual_clip", "task.tasks.y.")) for path in found)


def test_the_list_of_harmless_fields_names_fields_that_exist():
    from torchtitan_rl.config import config_difference

    paths = [path for path, _ in flat(config())]
    for entry in config_difference._HARMLESS:
        if entry.startswith(("roles.reference", "roles.teacher", "roles.reward_model")):
            continue  # this config has none of them
        assert any(p == entry or entry.endswith(".") and p.startswith(entry) for p in paths), entry
