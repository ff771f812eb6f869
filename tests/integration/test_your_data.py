"""The examples with a data set of one's own, as the pages for those who come from TRL and from verl have them: each is
a config file of at most 25 lines, and trains."""

import json
import re
from pathlib import Path

import datasets
import pytest

from tests.unit.rollout.templates import QWEN_LIKE, byte_bpe
from torchtitan_rl.config import AdamWConfig, GeneratorConfig, ModelConfig, Qwen3Shape, TrainerConfig
from torchtitan_rl.config.load import load_config
from torchtitan_rl.record import attempts
from torchtitan_rl.tasks.dataset import Dataset
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.validation.run import validate

DOCS = Path(__file__).parents[2] / "docs"
SHAPE = Qwen3Shape(
    vocab_size=400, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=128, max_seq_len=512
)
SYSTEM = {"from_trl": "End with #### and the number.", "from_verl": "As verl asks."}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """GSM8K-shaped rows in JSONL files, the same rows as verl's preprocessing writes them, and nothing cached
    elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, numbers in {"train": range(60), "test": range(60, 70)}.items():
        rows = [{"question": f"What is {i}+{i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in numbers]
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for row in rows:
            prompt = [{"role": "system", "content": "As verl asks."}, {"role": "user", "content": row.pop("question")}]
            ground_truth = row.pop("answer").rpartition("#### ")[2]
            row |= {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": ground_truth}}
        datasets.Dataset.from_list(rows).to_parquet(f"{split}.parquet")
    return tmp_path


def users_file(page: str) -> str:
    section = (DOCS / f"{page}.md").read_text().partition("\n## Your data set\n")[2]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


@pytest.mark.parametrize("page", ["from_trl", "from_verl"])
def test_the_page_turns_files_into_a_run_in_25_lines(page, data, loop):
    text = users_file(page)
    assert len([line for line in text.splitlines() if line.strip()]) <= 25
    (data / "mine.py").write_text(text)
    config = load_config("mine.py")
    validate(config)  # as written, for the 0.6B model

    # The same data and reward with a model of a few thousand parameters, and a tokenizer like Qwen's.
    byte_bpe(QWEN_LIKE).save_pretrained("assets")
    config.model = ModelConfig(assets="assets", shape=SHAPE)
    config.output_dir, config.controller.num_steps, config.controller.eval_every = "run", 2, 0
    config.controller.eval_tasks = config.controller.test_tasks = config.controller.pass_at_k = 2
    config.algorithm.tasks_per_step, config.algorithm.group_size = 2, 2
    config.sampling.max_prompt_tokens, config.sampling.max_tokens = 200, 8
    config.trainer = TrainerConfig(optimizer=AdamWConfig(lr=1e-3), max_tokens_per_microbatch=1024)
    config.trainer.training.seq_len = 256
    config.generator = GeneratorConfig(dtype="float32", max_model_len=256, max_num_seqs=8, kv_cache_gib=0.1)

    async def train():
        async with await Controller.launch(config, backend="local") as controller:
            await controller.train()
            return controller

    controller = loop.run_until_complete(train())
    assert controller.state.step == 2
    records = list(attempts.read_rollouts(controller.run_dir))
    trained = [record for record in records if record["step"] in (1, 2)]
    assert len(trained) >= 8 and all(SYSTEM[page] in record["prompt"] for record in trained)
    family: Dataset = controller.family
    task = family.task("test", 0)
    number = task.answer.rpartition("#### ")[2]
    assert list(family.reward(task, [f"#### {number}", "#### -1", ""])) == [1.0, 0.0, 0.0]
    assert [family.num_tasks(split) for split in ("train", "validation", "test")] == [57, 3, 10]
