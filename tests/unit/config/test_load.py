"""Config files, overrides from the shell, validation, and what a run directory records of them."""

import dataclasses
import functools
import hashlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from torchtitan_rl.algorithm.losses import ppo
from torchtitan_rl.cli.show import show
from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ExpertsShape, ModelConfig
from torchtitan_rl.config.resolve import flat, function_name, resolved
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.validation.run import missing_weights, validate

CONFIGS = Path(__file__).parents[3] / "configs"


# load_config


HEADER = """
from torchtitan_rl.config import RunConfig
from torchtitan_rl.config import ModelConfig
from torchtitan_rl.tasks.letter_sort import LetterSort
"""
GOOD = HEADER + "\ndef config():\n    return RunConfig(name='x', task=LetterSort.Config(), model=ModelConfig())\n"


def written(tmp_path, text, name="train.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_a_file_with_a_config_function(tmp_path):
    assert load_config(written(tmp_path, GOOD)).name == "x"


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path):
    written(tmp_path, GOOD, "quickstart.py")
    path = str(tmp_path / "quikstart.py")
    assert refusal(load_config, path) == (
        f"config={path!r}: there is no such file; did you mean {tmp_path / 'quickstart.py'}?"
    )


def test_a_missing_file_with_nothing_near_it(tmp_path):
    for path in (str(tmp_path / "quickstart.py"), str(tmp_path / "nowhere" / "quickstart.py"), str(tmp_path)):
        assert refusal(load_config, path) == (
            f"config={path!r}: there is no such file; give the path of a Python file with a config() function"
        )


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = written(tmp_path, "name: x", "run.yaml")
    assert refusal(load_config, path) == (
        f"config={path!r}: is not a Python file; give a .py file with a config() function"
    )


@pytest.mark.parametrize("text", ["", "config = 3"])
def test_a_file_without_a_config_function_is_refused(text, tmp_path):
    path = written(tmp_path, text)
    assert refusal(load_config, path) == f"config={path!r}: defines no config(); add `def config() -> RunConfig:`"


def test_a_config_function_that_returns_something_else_is_refused(tmp_path):
    path = written(tmp_path, "def config():\n    return {}\n")
    assert refusal(load_config, path) == f"config={path!r}: config() returned a dict; return a RunConfig"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def config(:", "SyntaxError: "),
    ],
)
def test_a_file_that_raises_is_refused_with_the_reason(text, what, tmp_path):
    path = written(tmp_path, text)
    message = refusal(load_config, path)
    assert message.startswith(f"config={path!r}: importing it raised {what}") and message.endswith("; mend the file")


def test_a_file_that_raises_at_length_is_refused_in_few_lines(tmp_path):
    path = written(tmp_path, "raise RuntimeError('one\\ntwo\\nthree\\nfour\\nfive')")
    assert "RuntimeError: one" in refusal(load_config, path)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("RunConfig(name='x', tusk=3)", "tusk"),
        (
            "RunConfig(name='x', task=LetterSort.Config(min_letters=9, max_letters=6), model=ModelConfig())",
            "min_letters=9",
        ),
        ("__import__('sys').exit(0)", "config() raised SystemExit: 0"),
    ],
    ids=["unknown field", "refused value", "end of the process"],
)
def test_a_config_function_that_raises_is_refused_by_its_file(body, what, tmp_path):
    path = written(tmp_path, HEADER + f"\ndef config():\n    return {body}\n")
    message = refusal(load_config, path)
    assert message.startswith(f"config={path!r}: ") and what in message


def test_functions_of_a_config_file_travel_by_value(tmp_path):
    """An actor's process has no such module: what it unpickles must carry the code."""
    path = written(tmp_path, GOOD + "\ndef double(x):\n    return 2 * x\n", "travels.py")
    load_config(path)
    pickled = cloudpickle.dumps(sys.modules["torchtitan_rl_config_travels"].double)
    program = f"import pickle; print(pickle.loads({pickled!r})(21))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60) == "42\n"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_of_the_repository_is_valid(path):
    config = load_config(str(path))
    validate(config)
    json.dumps(resolved(config))


# apply_overrides


def overridden(*arguments):
    config = run_config()
    apply_overrides(config, list(arguments))
    return config


def override_refusal(*arguments):
    """A refused override also leaves the config as it was."""
    config = run_config()
    before = list(flat(config))
    message = refusal(apply_overrides, config, list(arguments))
    assert list(flat(config)) == before
    return message


def test_no_arguments_change_nothing():
    assert overridden() == run_config()


def test_nested_fields_in_either_spelling():
    for arguments in (["--controller.num-steps", "5"], ["--controller.num_steps", "5"], ["--controller.num-steps=5"]):
        config = overridden(*arguments)
        assert config.controller.num_steps == 5
        config.controller.num_steps = run_config().controller.num_steps
        assert config == run_config()  # and nothing else


def test_several_overrides_are_applied_in_order():
    config = overridden("--seed", "3", "--trainer.optimizer.lr=1e-4", "--seed", "4")
    assert config.seed == 4 and config.trainer.optimizer.lr == 1e-4


def test_the_fields_people_set_most():
    config = overridden(
        "--seed",
        "7",
        "--output-dir",
        "runs/a",
        "--controller.num-steps",
        "3",
        "--trainer.optimizer.lr",
        "0.5",
        "--generator.dtype",
        "float32",
        "--generator.tensor-parallel-degree",
        "2",
        "--generator.num-replicas",
        "2",
        "--trainer.parallelism.data-parallel-shard-degree",
        "2",
        "--model.shape.dim",
        "32",
        "--task.max-letters",
        "5",
    )
    assert (config.seed, config.output_dir, config.controller.num_steps) == (7, "runs/a", 3)
    assert config.trainer.optimizer.lr == 0.5 and config.trainer.parallelism.data_parallel_shard_degree == 2
    assert (config.generator.dtype, config.generator.tensor_parallel_degree, config.generator.num_replicas) == (
        "float32",
        2,
        2,
    )
    assert config.model.shape.dim == 32 and config.task.max_letters == 5


@pytest.mark.parametrize(("text", "value"), [("True", True), ("False", False)])
def test_a_bool(text, value):
    assert overridden("--weight-sync.verify", text).weight_sync.verify is value


def test_a_tuple_is_one_argument():
    assert overridden("--trainer.optimizer.betas", "0.8 0.99").trainer.optimizer.betas == (0.8, 0.99)


@pytest.mark.parametrize(("text", "value"), [("1 2 3", [1, 2, 3]), ("7", [7]), ("", []), ("-1 2", [-1, 2])])
def test_a_list_is_one_argument(text, value):
    assert overridden("--sampling.stop-token-ids", text).sampling.stop_token_ids == value


@pytest.mark.parametrize(("text", "value"), [("0.6B", "0.6B"), ("None", None)])
def test_an_optional_field(text, value):
    assert overridden("--model.flavor", text).model.flavor == value


def test_an_entry_of_a_dict():
    config = overridden("--algorithm.loss-config.clip-low", "0.3")
    assert config.algorithm.loss_config == {"clip_low": 0.3, "clip_high": 0.28}


def test_fields_of_the_families_of_a_mixture():
    config = run_config()
    config.task = Mixture.Config(tasks={"sort": LetterSort.Config()}, weights={"sort": 2.0})
    apply_overrides(config, ["--task.tasks.sort.max-letters", "5", "--task.weights.sort", "3"])
    assert config.task.tasks["sort"].max_letters == 5 and config.task.weights == {"sort": 3.0}
    validate(config)
    json.dumps(resolved(config))
    config.task.tasks["sort"].min_letters = 9
    assert refusal(validate, config).startswith("letter_sort.min_letters=9, max_letters=5: do not fit")


def test_values_that_look_like_flags_or_hold_an_equals_sign():
    assert overridden("--seed", "-3").seed == -3  # for validate to refuse
    assert overridden("--output-dir=--x").output_dir == "--x"
    assert overridden("--output-dir=a=b").output_dir == "a=b"
    assert overridden("--output-dir=").output_dir == ""
    assert overridden("--name", "two words").name == "two words"


@pytest.mark.parametrize(
    ("flag", "text", "kind"),
    [
        ("--seed", "3.5", "int"),
        ("--seed", "", "int"),
        ("--trainer.optimizer.lr", "fast", "float"),
        ("--weight-sync.verify", "maybe", "bool"),
        ("--trainer.optimizer.betas", "0.8", "tuple[float, float]"),
        ("--trainer.optimizer.betas", "0.8 0.9 0.99", "tuple[float, float]"),
        ("--sampling.stop-token-ids", "1 x", "list[int]"),
        ("--algorithm.loss-config.clip-low", "x", "float"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(flag, text, kind):
    assert override_refusal(flag, text) == f"{flag}={text}: is not of type {kind}; give a value of that type"


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--sede", "--seed"),
        ("--controller.numsteps", "--controller.num-steps"),
        ("--controler.num-steps", "--controller.num-steps"),
        ("--trainer.lr", "--trainer.optimizer.lr"),
        ("--seed.x", "--seed"),
        ("--max-prompt-tokens", "--sampling.max-prompt-tokens"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(flag, near):
    assert override_refusal(flag, "1") == f"{flag}=1: there is no such field; did you mean {near}?"


def test_an_unknown_field_with_nothing_near_it():
    assert override_refusal("--zzz", "1") == (
        "--zzz=1: there is no such field; `torchtitan-rl show CONFIG` lists all fields"
    )


def test_a_new_argument_of_a_loss_is_a_new_key():
    config = overridden("--algorithm.loss-config.dual-clip", "3")
    assert config.algorithm.loss_config == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    validate(config)
    config = overridden("--algorithm.loss-config.clip-hihg", "0.3")
    assert refusal(validate, config) == (
        "algorithm.loss_config.clip_hihg=0.3: torchtitan_rl.algorithm.surrogate:ppo has no such argument; "
        "did you mean clip_high?"
    )


@pytest.mark.parametrize("section", ["trainer", "trainer.optimizer", "model.shape", "task", "weight-sync"])
def test_a_section_is_refused_with_one_of_its_fields(section):
    message = override_refusal(f"--{section}", "1")
    assert message.startswith(f"--{section}=1: is a section; set one of its fields, such as --{section}.")


def test_a_flag_without_a_value_is_refused():
    assert override_refusal("--seed") == "--seed: has no value; write --seed VALUE"


@pytest.mark.parametrize("argument", ["seed", "-s", "3"])
def test_an_argument_that_is_no_override_is_refused(argument):
    assert override_refusal(argument, "3") == (f"argument={argument!r}: is not an override; write --field.path value")


# validate


def invalid(*path, value):
    """The message `validate` refuses a config with after one field has been set."""
    config = run_config()
    target = config
    for name in path[:-1]:
        target = getattr(target, name)
    setattr(target, path[-1], value)
    return refusal(validate, config)


def test_a_valid_config_is_left_as_it_was():
    config = run_config()
    before = resolved(config)
    validate(config)
    assert resolved(config) == before and config == run_config()


def test_a_vocabulary_smaller_than_the_tokenizers():
    assert invalid("model", "shape", "vocab_size", value=63) == (
        "model.shape.vocab_size=63: the tokenizer of model.assets='chars' has 64 tokens; "
        "use the tokenizer the model was made for"
    )


def test_assets_without_a_tokenizer(tmp_path):
    assert invalid("model", "assets", value=str(tmp_path)) == (
        f"model.assets={str(tmp_path)!r}: has no tokenizer.json; give a directory with a tokenizer"
    )


def test_a_tokenizer_is_as_large_as_its_largest_id(tmp_path):
    # Byte-pair vocabularies keep special tokens beside the rest, often past the end of the others.
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 70, "content": "<eos>"}]})
    )
    assert "has 71 tokens" in invalid("model", "assets", value=str(tmp_path))


def test_a_unigram_tokenizer_has_its_pieces_in_order(tmp_path):
    pieces = [[f"piece {i}", -1.0] for i in range(90)]
    content = {"model": {"type": "Unigram", "vocab": pieces}, "added_tokens": [{"id": 0, "content": "<unk>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert "has 90 tokens" in invalid("model", "assets", value=str(tmp_path))


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1\noid sha256:aeb1\n", "[]", "{}"])
def test_a_tokenizer_file_that_is_none(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    said = invalid("model", "assets", value=str(tmp_path))
    assert said.startswith(f"model.assets={str(tmp_path)!r}: its tokenizer.json is no tokenizer (")
    assert said.endswith("fetch the directory again, a pointer of git-lfs with `git lfs pull`")


def test_assets_that_are_not_there():
    assert invalid("model", "assets", value="no/such/directory").startswith(
        "model.assets='no/such/directory': there is no such directory"
    )


def test_a_model_without_sizes():
    assert invalid("model", "shape", value=None).startswith("model.assets='chars': has no config.json")


def test_a_shape_and_a_flavour():
    assert invalid("model", "flavor", value="0.6B") == "model.flavor='0.6B': model.shape is set too; keep one of them"


@pytest.mark.parametrize("where", [("trainer", "parallelism"), ("generator",)], ids=".".join)
@pytest.mark.parametrize(
    ("degree", "complaint"),
    [
        (0, "must be at least 1"),
        (-1, "must be at least 1"),
        (3, "must divide the model's n_heads=4; use one of [1, 2]"),
        (4, "must divide the model's n_kv_heads=2; use one of [1, 2]"),
    ],
)
def test_a_tensor_parallel_degree_that_does_not_divide(where, degree, complaint):
    message = invalid(*where, "tensor_parallel_degree", value=degree)
    assert message == f"{'.'.join(where)}.tensor_parallel_degree={degree}: {complaint}"


def test_a_rank_that_would_hold_no_vocabulary():
    config = run_config()
    config.model.shape.n_heads = config.model.shape.n_kv_heads = 12
    config.trainer.parallelism.tensor_parallel_degree = 12  # 64 rows in parts of 6: ten ranks have 6, one 4, one none
    assert refusal(validate, config) == (
        "trainer.parallelism.tensor_parallel_degree=12: vocab_size=64 in parts of 6 leaves a rank without vocabulary; "
        "lower it"
    )


@pytest.mark.parametrize("where", [("trainer", "parallelism"), ("generator",)], ids=".".join)
def test_a_feed_forward_that_cannot_be_divided_leaves_one_degree(where):
    config = run_config()
    config.model.shape.hidden_dim = 25
    target = config.generator if where == ("generator",) else config.trainer.parallelism
    target.tensor_parallel_degree = 2
    assert refusal(validate, config) == (
        f"{'.'.join(where)}.tensor_parallel_degree=2: must divide the model's hidden_dim=25; use one of [1]"
    )


@pytest.mark.parametrize("name", ["data_parallel_shard_degree", "data_parallel_replicate_degree"])
@pytest.mark.parametrize("degree", [0, -1])
def test_a_data_parallel_degree_that_is_not_given(name, degree):
    message = invalid("trainer", "parallelism", name, value=degree)
    assert message == f"trainer.parallelism.{name}={degree}: must be at least 1"


@pytest.mark.parametrize("name", ["pipeline_parallel_degree", "context_parallel_degree"])
def test_a_kind_of_parallelism_that_is_not_supported(name):
    message = invalid("trainer", "parallelism", name, value=2)
    assert message == f"trainer.parallelism.{name}=2: is not supported; use 1"


def test_another_spmd_backend():
    assert invalid("trainer", "parallelism", "spmd_backend", value="full_dtensor") == (
        "trainer.parallelism.spmd_backend='full_dtensor': use 'partial_dtensor', the backend that runs on gloo as well "
        "as on NCCL"
    )


@pytest.mark.parametrize("where", [("trainer", "training", "seq_len"), ("generator", "max_model_len")], ids=".".join)
def test_contexts_are_bounded_by_the_model_and_by_what_is_sampled(where):
    shown = ".".join(where)
    assert invalid(*where, value=65) == f"{shown}=65: exceeds the model's max_seq_len=64; lower it"
    assert invalid(*where, value=19) == (
        f"{shown}=19: is shorter than sampling.max_prompt_tokens + max_tokens = 20; raise it or lower one of them"
    )
    for fits in (20, 64):
        config = run_config()
        apply_overrides(config, [f"--{shown}", str(fits)])
        validate(config)


def test_limits_of_rollouts():
    config = run_config()
    config.sampling.max_rollout_tokens = config.sampling.max_prompt_tokens + 1
    validate(config)
    assert invalid("sampling", "max_rollout_tokens", value=config.sampling.max_prompt_tokens).startswith(
        f"sampling.max_rollout_tokens={config.sampling.max_prompt_tokens}: leaves nothing after a prompt"
    )
    assert invalid("sampling", "max_rollout_tokens", value=10_000).startswith(
        f"sampling.max_rollout_tokens=10000: exceeds generator.max_model_len={config.generator.max_model_len}; lower it"
    )
    assert invalid("sampling", "max_turns", value=0) == "sampling.max_turns=0: must be at least 1"
    for value, must in (
        (0.0, "positive"),
        (float("inf"), "finite and positive"),
        (float("nan"), "finite and positive"),
    ):
        assert invalid("sampling", "rollout_timeout_s", value=value) == (
            f"sampling.rollout_timeout_s={value}: must be {must}; use seconds"
        )
    assert invalid("sampling", "stop", value=["a", ""]).startswith("sampling.stop=['a', '']: an empty text")


def test_a_workflow_takes_what_it_is_given():
    async def right(task, policy, *, rollout_id, seed): ...
    async def wrong(task, policy): ...

    config = run_config()
    config.algorithm.workflow = right
    validate(config)
    message = invalid("algorithm", "workflow", value=wrong)
    assert message.startswith("algorithm.workflow=")
    assert "cannot be called as (task, policy, rollout_id=, seed=)" in message and ".wrong (test_load.py:" in message


@pytest.mark.parametrize(
    "where",
    [
        ("algorithm", "group_size"),
        ("algorithm", "tasks_per_step"),
        ("sampling", "max_tokens"),
        ("generator", "num_replicas"),
        ("supervised", "batch_size"),
    ],
    ids=".".join,
)
def test_counts_are_positive(where):
    assert invalid(*where, value=0) == f"{'.'.join(where)}=0: must be at least 1"


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_training_samples_are_not_greedy(temperature):
    assert invalid("algorithm", "temperature", value=temperature) == (
        f"algorithm.temperature={temperature}: must be at least 0.01; use 1, training samples are not greedy"
    )


def test_a_chunk_of_negative_size():
    assert invalid("trainer", "logprob_chunk_mib", value=-1) == (
        "trainer.logprob_chunk_mib=-1: must not be negative; use 0 for the device's own size"
    )


def test_a_negative_seed():
    problem = "must be at least 0 and below 9223372036854775808; use 0, 1, 2, ..."
    assert invalid("seed", value=-1) == f"seed=-1: {problem}"
    assert invalid("seed", value=2**63) == f"seed={2**63}: {problem}"


def test_a_task_is_checked_again_after_overrides():
    # Its own checks ran when the config was made, before the shell had its say.
    config = overridden("--task.min-letters", "9")
    assert "min_letters=9" in refusal(validate, config)


# resolved, flat, show


def test_functions_are_recorded_by_name_and_source():
    entry = resolved(run_config())["algorithm"]["loss_fn"]
    source = hashlib.sha256(inspect.getsource(ppo).encode()).hexdigest()[:16]
    assert entry == {"function": "torchtitan_rl.algorithm.surrogate:ppo", "source_sha256": source}


def test_another_source_has_another_hash(tmp_path):
    def recorded(name, body):
        reward = f"\n\ndef reward(task, completions):\n    {body}\n"
        config = GOOD.replace("LetterSort.Config()", "LetterSort.Config(reward=reward)")
        return resolved(load_config(written(tmp_path, config + reward, name)))["task"]["reward"]

    one, same, other = recorded("a.py", "return [0]"), recorded("b.py", "return [0]"), recorded("c.py", "return [1]")
    assert one["function"] == "torchtitan_rl_config_a:reward"
    assert one["source_sha256"] == same["source_sha256"] != other["source_sha256"]
    assert len(one["source_sha256"]) == 16


def test_a_function_among_the_arguments_of_another_counts_by_its_source_too(tmp_path):
    def recorded(name, body):
        functions = f"\n\nfrom functools import partial\n\ndef judge(task):\n    {body}\n\ndef reward(*args): ...\n"
        config = GOOD.replace("LetterSort.Config()", "LetterSort.Config(reward=partial(reward, judge, times=2))")
        return resolved(load_config(written(tmp_path, config + functions, name)))["task"]["reward"]

    one, same, other = recorded("a.py", "return 0"), recorded("b.py", "return 0"), recorded("c.py", "return 1")
    assert one["source_sha256"] == other["source_sha256"] and len(one["argument_sha256"]) == 1
    assert one["argument_sha256"] == same["argument_sha256"] != other["argument_sha256"]


def test_a_resolved_config_is_plain_data_with_its_classes():
    plain = resolved(run_config())
    assert json.loads(json.dumps(plain)) == plain
    assert plain["class"] == "torchtitan_rl.config.run:RunConfig"
    assert plain["task"]["class"] == "torchtitan_rl.tasks.letter_sort:LetterSort.Config"
    assert plain["task"]["max_letters"] == 6 and plain["task"]["reward"] is None
    assert plain["model"]["shape"]["n_kv_heads"] == 2
    assert plain["algorithm"]["loss_config"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert plain["trainer"]["optimizer"]["betas"] == [0.9, 0.95]


def test_the_name_of_a_function_with_arguments_filled_in():
    assert function_name(ppo) == "torchtitan_rl.algorithm.surrogate:ppo"
    assert function_name(functools.partial(ppo, clip_low=0.1)) == "torchtitan_rl.algorithm.surrogate:ppo(clip_low=0.1)"
    assert function_name(LetterSort.reward) == "torchtitan_rl.tasks.letter_sort:LetterSort.reward"


def test_flat_goes_through_sections_and_dicts_in_order():
    leaves = dict(flat(run_config()))
    assert list(leaves)[:3] == ["name", "task.min_letters", "task.max_letters"]
    assert leaves["algorithm.loss_config.clip_high"] == 0.28 and leaves["model.shape.head_dim"] == 32
    assert leaves["trainer.optimizer.betas"] == (0.9, 0.95) and "trainer" not in leaves


def test_show_prints_flags_sizes_and_processes(capsys):
    show(run_config())
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "--name 'unit'",
        "--controller.num-steps 100",
        "--algorithm.loss-config.clip-low 0.2",
        "--algorithm.loss-fn torchtitan_rl.algorithm.surrogate:ppo",
        "--model.flavor None",
        "model: 15,824 parameters",  # 64 x 16 + 2 x 7392 + 16
        "processes: 1 policy trainer, 1 x 1 generator, 1 controller; on several hosts 1 store",
    ):
        assert line in lines
    # The figures are those of test_memory.py.
    starts = [line.split(":")[0] for line in lines if line.startswith("memory, ")]
    assert starts == [
        "memory, policy rank",
        "memory, generator rank",
        "memory, weights in the store, per live version",
        "memory, a GPU with one rank of policy and generator-0",
    ]


def test_show_groups_the_meshes_that_meet_on_a_gpu(capsys):
    config = run_config()
    config.roles.reference = RoleConfig()
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config.generator.num_replicas = 2
    for colocation, groups in (
        ("none", ["policy", "reference", "generator-0"]),
        ("policy_reference", ["policy and reference", "generator-0"]),
        ("all", ["policy and reference and generator-0"]),
    ):
        config.roles.colocation = colocation
        show(config)
        lines = capsys.readouterr().out.splitlines()
        start = "memory, a GPU with one rank of "
        assert [line.removeprefix(start).split(":")[0] for line in lines if line.startswith(start)] == groups


def test_show_counts_the_parameters_of_adapters(capsys):
    config = run_config()
    config.trainer.lora = LoRAConfig(rank=3)
    show(config)
    # Two blocks, rank 3: 16 + 256 for query, key, value, 128 + 16 for the output, 3 x (16 + 24) for the feed-forward.
    assert "adapters: 3,216 parameters, which alone train" in capsys.readouterr().out.splitlines()


def test_neither_vllm_nor_monarch_is_needed_to_read_a_config():
    program = """
import sys
from torchtitan_rl.config import apply_overrides, load_config, resolved
from torchtitan_rl.validation.run import validate
from torchtitan_rl.cli.show import show
for path in sys.argv[1:]:
    config = load_config(path)
    apply_overrides(config, ["--seed", "3", "--controller.eval-tasks", "32"])
    validate(config)
    resolved(config)
    show(config)
heavy = {"vllm", "monarch", "torchstore", "fastapi"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy
"""
    configs = sorted(map(str, CONFIGS.glob("*.py")))
    assert any(path.endswith("quickstart.py") for path in configs)
    done = subprocess.run([sys.executable, "-c", program, *configs], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--seed 3" in done.stdout and "--controller.eval-tasks 32" in done.stdout


def test_the_package_alone_imports_nothing_heavy():
    program = "import sys, torchtitan_rl; assert not {'torch', 'vllm', 'monarch', 'torchtitan'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_value_of_several_words_needs_no_quotes():
    config = overridden("--trainer.optimizer.betas", "0.8", "0.9", "--seed", "2")
    assert config.trainer.optimizer.betas == (0.8, 0.9) and config.seed == 2


def test_a_boolean_may_be_written_either_way():
    assert overridden("--weight-sync.verify", "false").weight_sync.verify is False
    assert overridden("--weight-sync.verify", "True").weight_sync.verify is True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("algorithm.temperature", "nan"),
        ("trainer.optimizer.lr", "nan"),
        ("trainer.optimizer.lr", "-1"),
        ("sampling.max_prompt_tokens", "-5"),
        ("controller.num_steps", "-5"),
        ("trainer.max_tokens_per_microbatch", "-1"),
        ("controller.eval_tasks", "0"),
        ("task.min_letters", "9"),
    ],
)
def test_values_that_make_no_sense_are_refused(field, value):
    config = overridden(f"--{field}", value)
    with pytest.raises(ValueError, match=field.rsplit(".", 1)[-1]):
        validate(config)


def test_a_loss_argument_that_the_loss_does_not_have_is_refused():
    config = overridden()
    config.algorithm.loss_config["clip_hihg"] = 0.3
    with pytest.raises(ValueError, match=r"algorithm.loss_config.clip_hihg=0.3: .*:ppo has no such argument"):
        validate(config)


def role(model=None):
    trainer = TrainerConfig()
    trainer.training.seq_len = 32
    return RoleConfig(trainer=trainer, model=model)


def shape(**changes):
    return dataclasses.replace(run_config().model.shape, **changes)


def test_a_roles_layout_is_checked_like_the_policys():
    config = run_config()
    config.roles.critic = role()
    config.roles.critic.trainer.parallelism.tensor_parallel_degree = 3
    with pytest.raises(ValueError, match=r"^roles.critic.trainer.parallelism.tensor_parallel_degree=3: must divide"):
        validate(config)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"refresh_reference_every": 5}, "roles.refresh_reference_every=5: there is no reference to refresh"),
        (
            {"reference": role(), "refresh_reference_every": -1},
            "roles.refresh_reference_every=-1: must not be negative",
        ),
        ({"colocation": "policy_reference"}, "roles.colocation='policy_reference': there is no reference"),
        ({"teacher": role()}, "roles.teacher.model=None: a teacher is another model than the policy"),
        (
            {"teacher": role(ModelConfig(assets="chars", shape=shape(vocab_size=80)))},
            "roles.teacher.model: has a vocabulary of 80 tokens, the policy has 64",
        ),
        (
            {"reference": role(ModelConfig(assets="chars", shape=shape(n_layers=3))), "refresh_reference_every": 2},
            "roles.refresh_reference_every=2: the reference has another shape",
        ),
    ],
)
def test_roles_that_make_no_sense_together_are_refused(given, message):
    config = run_config()
    for name, value in given.items():
        setattr(config.roles, name, value)
    with pytest.raises(ValueError) as caught:
        validate(config)
    assert str(caught.value).startswith(message)


def test_adapters_are_the_policys():
    config = run_config()
    config.roles.critic = role()
    config.roles.critic.trainer.lora = LoRAConfig(rank=4)
    with pytest.raises(ValueError, match="roles.critic.trainer.lora.rank=4: adapters are the policy's"):
        validate(config)


def test_experts_have_no_adapters():
    config = run_config()
    config.model.shape = shape(experts=ExpertsShape(num_experts=4, top_k=2))
    config.trainer.lora = LoRAConfig(rank=4, target_modules=["qkv_proj", "up_proj"])
    with pytest.raises(
        ValueError, match="trainer.lora.target_modules='up_proj': experts of a mixture have no adapters"
    ):
        validate(config)
    config.trainer.lora = LoRAConfig(rank=4, target_modules=["qkv_proj", "o_proj"])
    experts = config.model.shape.experts
    config.model.shape.experts = dataclasses.replace(experts, load_balance_coeff=0.01)
    assert "moves a bias of its routers, which no checkpoint of adapters has" in refusal(validate, config)
    config.model.shape.experts = experts
    validate(config)


def test_every_role_that_makes_sense_is_accepted():
    config = run_config()
    config.roles.reference, config.roles.critic = role(), role()
    config.roles.teacher = role(ModelConfig(assets="chars", shape=shape(n_layers=3)))
    config.roles.refresh_reference_every, config.roles.colocation = 3, "all"
    validate(config)
    assert list(config.roles.configured()) == ["reference", "critic", "teacher"]


def test_a_field_of_a_role_is_set_from_the_shell():
    config = run_config()
    config.roles.critic = role()
    apply_overrides(config, ["--roles.critic.trainer.optimizer.lr", "0.5", "--roles.colocation", "all"])
    assert config.roles.critic.trainer.optimizer.lr == 0.5 and config.roles.colocation == "all"


def test_a_batch_is_a_whole_number_of_steps():
    config = run_config()
    config.algorithm.tasks_per_step, config.algorithm.tasks_per_minibatch, config.algorithm.num_epochs = 10, 4, 2
    assert config.algorithm.steps_per_batch == 6
    with pytest.raises(ValueError) as caught:
        validate(config)
    assert str(caught.value) == (
        "controller.num_steps=100: a batch is 6 optimizer steps (algorithm.num_epochs x its "
        "minibatches); use a multiple, such as 96 or 102"
    )
    config.controller.num_steps = 96
    validate(config)


def test_a_minibatch_larger_than_the_batch_is_refused():
    config = run_config()
    config.algorithm.tasks_per_minibatch = 17
    with pytest.raises(
        ValueError, match=r"algorithm.tasks_per_minibatch=17: must be between 0 .* and .*tasks_per_step=16"
    ):
        validate(config)


def test_a_role_of_another_vocabulary_or_dtype_is_refused():
    config = run_config()
    config.roles.critic = role(ModelConfig(assets="chars", shape=shape(vocab_size=80)))
    with pytest.raises(ValueError, match="roles.critic.model: has a vocabulary of 80 tokens, the policy has 64"):
        validate(config)
    config.roles.critic, config.roles.reference = None, role()
    config.roles.reference.trainer.training.dtype = "bfloat16"
    with pytest.raises(
        ValueError, match="roles.reference.trainer.training.dtype='bfloat16': the policy's, .* is 'float32'"
    ):
        validate(config)


def test_what_a_critic_is_trained_by_is_checked_before_the_start():
    config = run_config()
    config.roles.critic = role()
    config.algorithm.critic_loss_config = {"clipp": 0.2}
    with pytest.raises(
        ValueError,
        match="algorithm.critic_loss_config.clipp=0.2: .*:value_loss has no such argument; did you mean clip",
    ):
        validate(config)
    config.algorithm.critic_loss_config, config.algorithm.gae_lambda = {}, 1.5
    with pytest.raises(ValueError, match="algorithm.gae_lambda=1.5: must be between 0 and 1"):
        validate(config)


def test_every_role_that_must_have_weights_is_looked_at():
    config = run_config()
    config.roles.teacher = role(ModelConfig(assets="chars", shape=shape(n_layers=3), pretrained=True))
    assert "has no safetensors" in missing_weights(config)


def test_sizes_that_would_fail_only_in_a_process():
    eps, gib = "trainer.optimizer.eps", "generator.kv_cache_gib"
    assert invalid(*eps.split("."), value=0.0) == f"{eps}=0.0: must be at least 1e-30; use 1e-8"
    assert invalid(*gib.split("."), value=float("inf")).startswith(f"{gib}=inf: must be finite")
