"""A model as judge: the quickstart's model trains on the verdicts of another model; the exact answer is measured
and does not train (`reward/part_exact_mean`, `eval/reward_part_exact_mean`): .113 of the validation tasks after the
warm start, .621 at the end, with seed 0.

First make the judge, serve it, then train::

    torchtitan-rl train configs/letter_sort_judge.py
    torchtitan-rl serve runs/letter_sort_judge/checkpoints/step-0 --dtype float32 --kv-cache-gib 0.25 --max-model-len 64
    torchtitan-rl train configs/judge.py

The judge solves each task before its verdict: one that gives its verdict at once is deceived within 20 steps. A KL
keeps the policy near its warm start; docs/rewards.md has what each of the two is worth.

A group with a verdict that cannot be read is dropped, with the reason in the log; `failure/reward` counts them.

Differs from the quickstart:
- task.min_letters: 3, not 4; a smaller task, for a few minutes
- task.max_letters: 4, not 6
- task.correct_demonstrations: 0.1, not 0.0; a verdict gives nothing for a part of the answer
- task.reward: Rewards(functions={"judge": HttpJudge(base_url="http://127.0.0.1:8000/v1", model="policy",
  prompt="{prompt}{completion}?", parse=verdict, concurrency=256, request={"temperature": 0.0, "max_tokens": 12},
  chat=False), "exact": exact}, weights={"judge": 1.0, "exact": 0.0}), not None
- algorithm.tasks_per_step: 16, not 32
- algorithm.on_rollout_failure: "drop_group", not "fail"
- algorithm.kl_coef: 0.1, not 0.0
- roles.reference: RoleConfig(), not None
- controller.num_steps: 60, not 160
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.judge_http import HttpJudge, Verdict
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.rewards import Rewards

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


def exact(task, completions):
    return [float(completion == task.answer) for completion in completions]


def verdict(text):
    """The word after the judge's own answer, as in `cisyz:n`."""
    return Verdict({"y": 1.0, "n": 0.0})(text.rpartition(":")[2])


def config() -> rl.RunConfig:
    judge = HttpJudge(
        base_url="http://127.0.0.1:8000/v1",
        model="policy",
        chat=False,
        prompt="{prompt}{completion}?",
        parse=verdict,
        concurrency=256,
        request={"temperature": 0.0, "max_tokens": 12},
    )
    config = rl.RunConfig(
        name="judge",
        task=LetterSort.Config(
            min_letters=3,
            max_letters=4,
            correct_demonstrations=0.1,
            reward=Rewards({"judge": (judge, 1.0), "exact": (exact, 0.0)}),
        ),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.grpo(
            tasks_per_step=16,
            reduction=reductions.token_mean,
            on_rollout_failure="drop_group",
            kl_coef=0.1,
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=60, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.roles.reference = rl.RoleConfig()
    config.trainer.training.seq_len = 64
    return config
