"""The config files: what a variant of the quickstart says of itself is all that it changes, and no file resolves to
anything unsaid."""

import dataclasses
import functools
import json
import re
import sys
import types
from pathlib import Path

import pytest

from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.tasks.letter_sort import LetterSort

CONFIGS = Path(__file__).parents[2] / "configs"
FLAVOR = """
- model.shape: None, not Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32,
  hidden_dim=384, max_seq_len=512)
- model.flavor: "0.6B", not None"""
LLAMA = """
- model.shape: Llama3Shape(vocab_size=128256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64,
  hidden_dim=8192, max_seq_len=131072, rope_scaling=Llama3Scaling(factor=32.0, original_max_seq_len=8192)), not
  Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384,
  max_seq_len=512)"""
QWEN2_5 = """
- model.shape: Qwen2Shape(vocab_size=151936, dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, head_dim=128,
  hidden_dim=8960, max_seq_len=32768), not Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2,
  head_dim=32, hidden_dim=384, max_seq_len=512)"""
QWEN3_5 = """
- model.shape: Qwen35Shape(vocab_size=248320, dim=1024, n_layers=24, n_heads=8, n_kv_heads=2, head_dim=256,
  hidden_dim=3584, max_seq_len=262144, n_key_heads=16, n_value_heads=16, key_head_dim=128, value_head_dim=128), not
  Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384,
  max_seq_len=512)"""
QWEN3 = (
    FLAVOR
    + """
- model.pretrained: True, not False
- supervised.num_steps: 0, not 300
- supervised.batch_size: 128, not 64
- supervised.schedule.warmup_steps: 0, not 20
- supervised.betas: (0.9, 0.95), not (0.9, 0.99)
- algorithm.loss_config: {"clip_low": 0.2, "clip_high": 0.28}, not {"clip_low": 0.2, "clip_high": 0.2}
- algorithm.schedule.decay: "constant", not "linear"
- algorithm.schedule.final_factor: 0.0, not 0.1
- controller.num_steps: 200, not 160
- controller.pass_at_k: 4, not 8
- sampling.max_tokens: 1024, not 12
- trainer.optimizer.lr: 1e-06, not 0.001
- trainer.optimizer.betas: (0.9, 0.95), not (0.9, 0.99)
- trainer.training.seq_len: 0, not 64
- trainer.training.mixed_precision_param: "bfloat16", not "float32"
- trainer.activation_checkpoint: "selective", not "none"
- generator.dtype: "bfloat16", not "float32"
- generator.max_model_len: 2048, not 64"""
)
GSM8K = (
    QWEN3
    + """
- task: Gsm8k.Config(), not LetterSort.Config()
- algorithm.tasks_per_step: 64, not 32
- algorithm.schedule.warmup_steps: 10, not 5
- controller.test_tasks: 1319, not 512
- sampling.max_prompt_tokens: 512, not 16"""
)
OTHERS = {  # files that are no variants of the quickstart, and so do not say how they differ from it
    "qwen3_0_6b_gsm8k": GSM8K + "\n- generator.kv_cache_gib: 40.0, not 0.25",
    "qwen3_4b_gsm8k": GSM8K.replace('"0.6B"', '"4B"')
    + """
- trainer.max_tokens_per_microbatch: 8192, not 16384
- roles.colocation: "all", not "none"
- generator.kv_cache_gib: 48.0, not 0.25""",
    "llama3_2_1b_gsm8k": GSM8K.replace(FLAVOR, LLAMA)
    + "\n- trainer.max_tokens_per_microbatch: 8192, not 16384\n- generator.kv_cache_gib: 24.0, not 0.25",
    "qwen2_5_1_5b_gsm8k": GSM8K.replace(FLAVOR, QWEN2_5)
    + "\n- trainer.max_tokens_per_microbatch: 8192, not 16384\n- generator.kv_cache_gib: 22.0, not 0.25",
    "qwen3_5_0_8b_gsm8k": GSM8K.replace(FLAVOR, QWEN3_5)
    + "\n- trainer.max_tokens_per_microbatch: 8192, not 16384\n- generator.kv_cache_gib: 20.0, not 0.25",
    "reasoning_gym": QWEN3
    + """
- task: ReasoningGym.Config(datasets={"chain_sum": {"min_terms": 2, "max_terms": 4}, "basic_arithmetic": {}}), not
  LetterSort.Config()
- controller.eval_tasks: 128, not 256
- controller.test_tasks: 256, not 512
- sampling.max_prompt_tokens: 1024, not 16
- generator.max_num_seqs: 256, not 512
- generator.kv_cache_gib: 16.0, not 0.25""",
    "letter_sort_judge": """
- task: LetterSortVerdicts.Config(), not LetterSort.Config()
- supervised.num_steps: 800, not 300
- algorithm.tasks_per_step: 16, not 32
- algorithm.advantage_fn: group_centered, not grpo
- algorithm.loss_config: {}, not {"clip_low": 0.2, "clip_high": 0.2}
- algorithm.schedule.decay: "constant", not "linear"
- algorithm.schedule.warmup_steps: 0, not 5
- algorithm.schedule.final_factor: 0.0, not 0.1
- controller.num_steps: 0, not 160
- controller.pass_at_k: 0, not 8
- sampling.max_tokens: 8, not 12
- trainer.optimizer.lr: 1e-05, not 0.001
- trainer.optimizer.betas: (0.9, 0.95), not (0.9, 0.99)
- output_dir: "runs/letter_sort_judge", not \"\"""",
    "letter_sort_teacher": """
- task.correct_demonstrations: 1.0, not 0.0
- model.shape.dim: 192, not 128
- model.shape.n_layers: 6, not 4
- model.shape.n_heads: 6, not 4
- model.shape.n_kv_heads: 3, not 2
- model.shape.hidden_dim: 576, not 384
- supervised.num_steps: 400, not 300
- algorithm.tasks_per_step: 16, not 32
- algorithm.advantage_fn: group_centered, not grpo
- algorithm.loss_config: {}, not {"clip_low": 0.2, "clip_high": 0.2}
- algorithm.schedule.decay: "constant", not "linear"
- algorithm.schedule.warmup_steps: 0, not 5
- algorithm.schedule.final_factor: 0.0, not 0.1
- controller.num_steps: 0, not 160
- controller.pass_at_k: 0, not 8
- trainer.optimizer.lr: 1e-05, not 0.001
- trainer.optimizer.betas: (0.9, 0.95), not (0.9, 0.99)
- output_dir: "runs/letter_sort_teacher", not \"\"""",
}
QUICKSTART = """
- model.shape: Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384,
  max_seq_len=512), not None
- supervised.num_steps: 300, not 0
- supervised.batch_size: 64, not 128
- supervised.schedule.warmup_steps: 20, not 0
- supervised.betas: (0.9, 0.99), not (0.9, 0.95)
- algorithm.tasks_per_step: 32, not 16
- algorithm.advantage_fn: grpo, not group_centered
- algorithm.loss_config: {"clip_low": 0.2, "clip_high": 0.2}, not {}
- algorithm.schedule.decay: "linear", not "constant"
- algorithm.schedule.warmup_steps: 5, not 0
- algorithm.schedule.final_factor: 0.1, not 0.0
- controller.num_steps: 160, not 100
- sampling.max_prompt_tokens: 16, not 512
- sampling.max_tokens: 12, not 512
- trainer.optimizer.lr: 0.001, not 1e-05
- trainer.optimizer.betas: (0.9, 0.99), not (0.9, 0.95)
- trainer.max_tokens_per_microbatch: 16384, not 0
- trainer.training.seq_len: 64, not 0
- generator.dtype: "float32", not "bfloat16"
- generator.max_model_len: 64, not 0
- generator.max_num_seqs: 512, not 256
- generator.kv_cache_gib: 0.25, not 1.0"""


def written(value, default=None):
    """The value as a config file would write it: functions by name, sections without what equals `default`, or where
    that is of another class the class's defaults."""
    if dataclasses.is_dataclass(value):
        arguments = []
        for field in (field for field in dataclasses.fields(value) if field.init):
            held = getattr(value, field.name)
            usual = getattr(default, field.name) if type(default) is type(value) else default_of(field)
            if written(held) != written(usual):
                arguments.append(f"{field.name}={written(held, usual)}")
        return f"{type(value).__qualname__}({', '.join(arguments)})"
    if isinstance(value, functools.partial):
        arguments = ", ".join(f"{name}={written(argument)}" for name, argument in value.keywords.items())
        return f"{value.func.__name__}({arguments})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value)
    return value.__name__ if isinstance(value, types.FunctionType) else repr(value)


def default_of(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def differences(config, base, path=""):
    """`path: value, not the base's` for each setting that differs; sections of one class are compared by field."""
    if dataclasses.is_dataclass(config) and type(config) is type(base):
        for field in dataclasses.fields(config):
            yield from differences(getattr(config, field.name), getattr(base, field.name), f"{path}.{field.name}")
    elif written(config) != written(base):
        yield f"{path[1:]}: {written(config)}, not {written(base)}"


def said(text):
    """The items of a list of `- path: value, not the base's`, without a remark after a semicolon."""
    items = re.findall(r"^- (.*?)(?=\n- |\n*\Z)", text.strip(), re.DOTALL | re.MULTILINE)
    return sorted(" ".join(item.split(";")[0].split()) for item in items)


def found(name, base):
    config = load_config(str(CONFIGS / f"{name}.py"))
    assert re.sub(r"\W", "_", config.name) == name
    config.name = base.name
    return sorted(differences(config, base))


@pytest.fixture
def quickstart():
    return load_config(str(CONFIGS / "quickstart.py"))


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "quickstart"))
def test_a_file_differs_from_the_quickstart_in_what_it_says(name, quickstart):
    differs = found(name, quickstart)
    text = OTHERS.get(name)
    if text is None:
        text = sys.modules[f"torchtitan_rl_config_{name}"].__doc__.split("Differs from the quickstart:")[1]
    assert differs == said(text)


def test_the_quickstart_is_these_settings_and_defaults():
    defaults = RunConfig(name="", task=LetterSort.Config(), model=ModelConfig())
    assert found("quickstart", defaults) == said(QUICKSTART)


def test_a_difference_that_nothing_says_is_found(quickstart):
    changed = load_config(str(CONFIGS / "quickstart.py"))
    changed.algorithm.loss_config["clip_high"] = 0.3
    changed.trainer.training.max_norm = 2.0
    assert list(differences(changed, quickstart)) == [
        'algorithm.loss_config: {"clip_low": 0.2, "clip_high": 0.3}, not {"clip_low": 0.2, "clip_high": 0.2}',
        "trainer.training.max_norm: 2.0, not 1.0",
    ]


def test_a_list_of_differences_is_read_without_remarks():
    text = "\n- a.b: 1, not 2; because\n- c: f(x=1,\n  y=2), not None\n"
    assert said(text) == ["a.b: 1, not 2", "c: f(x=1, y=2), not None"]
