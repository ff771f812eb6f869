"""A judge for `configs/judge.py`: a small Qwen3 that reads a task with an answer, `szyci=ciszy?`, solves the task, and
says whether the answer is right: `cisyz:n`.

Learns from demonstrations; there is no reinforcement. Writes `runs/letter_sort_judge`.
"""

import random
from dataclasses import dataclass, field

import torchtitan_rl.config as rl
from torchtitan_rl import Task
from torchtitan_rl.tasks.family import stable_hash
from torchtitan_rl.tasks.letter_sort import LetterSort, made_up_answer

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


class LetterSortVerdicts:
    """Letter sort's tasks with made-up answers, to be called right or wrong after the judge's own answer.

    A judge that gives a verdict at once learns what wrong answers look like, and a policy finds one that does not look
    wrong. One that first solves the task compares.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        task: LetterSort.Config = field(default_factory=lambda: LetterSort.Config(min_letters=3, max_letters=4))
        """Which tasks are answered."""

        def build(self):
            return LetterSortVerdicts(self)

    name = "letter_sort_verdicts"

    def __init__(self, config):
        self.answered = config.task.build()

    def num_tasks(self, split):
        return self.answered.num_tasks(split)

    def task(self, split, index):
        task = self.answered.task(split, index)
        answer = made_up_answer(task, random.Random(stable_hash(self.name, task.id)))
        verdict = "y" if answer == task.answer else "n"
        return Task(
            id=f"verdict/{task.id}",
            prompt=f"{task.prompt}{answer}?",
            answer=verdict,
            demonstration=f"{task.answer}:{verdict}",
        )

    def reward(self, task, completions):
        return [float(completion.rpartition(":")[2] == task.answer) for completion in completions]


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="letter_sort_judge",
        task=LetterSortVerdicts.Config(),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=800,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        controller=rl.ControllerConfig(num_steps=0, test_tasks=512, pass_at_k=0),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=8),
        trainer=rl.TrainerConfig(max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
        output_dir="runs/letter_sort_judge",
    )
    config.trainer.training.seq_len = 64
    return config
