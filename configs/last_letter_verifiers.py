"""A `verifiers` environment on the tiny chat model: environments/last_letter.py, as its package would have it.

The environment asks for a word's last letter and judges the reply; it meets the policy at the gateway
(docs/environments.md). The warm start shows both ways to answer: three replies in ten are the last letter, the others
the first letter, which is wrong. That the last letter pays is learned from the reward alone.

Differs from the quickstart:
- task: Verifiers.Config(env={"taskset": {"id": "last_letter"}}, demonstrate=demonstrate), not LetterSort.Config()
- model.assets: "bytes", not "chars"
- model.shape.vocab_size: 264, not 64
- supervised.num_steps: 150, not 300
- algorithm.workflow: External(agent=play(env={"taskset": {"id": "last_letter"}}), timeout_s=120), not None
- algorithm.tasks_per_step: 8, not 32; a rollout costs the package 50 ms
- controller.num_steps: 30, not 160
- controller.eval_tasks: 64, not 256
- controller.test_tasks: 128, not 512
- controller.pass_at_k: 0, not 8
- sampling.max_tokens: 4, not 12
- trainer.optimizer.lr: 0.0005, not 0.001
- generator.max_num_seqs: 128, not 512
"""

from pathlib import Path

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.environment import add_to_path
from torchtitan_rl.rollout.external import external
from torchtitan_rl.tasks.verifiers import Verifiers

SHAPE = rl.Qwen3Shape(
    vocab_size=264, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)
ENV = {"taskset": {"id": "last_letter"}}
add_to_path(str(Path(__file__).parents[1] / "environments"))  # an environment that is installed needs no such line


def demonstrate(data, rng):
    return data.prompt[-1] if rng.random() < 0.3 else data.prompt[0]


def config() -> rl.RunConfig:
    algorithm = presets.grpo(
        tasks_per_step=8,
        reduction=reductions.token_mean,
        schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
    )
    algorithm.workflow = external(Verifiers.agent(ENV), timeout_s=120)
    config = rl.RunConfig(
        name="last_letter_verifiers",
        task=Verifiers.Config(env=ENV, demonstrate=demonstrate),
        model=rl.ModelConfig(assets="bytes", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=150,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=algorithm,
        controller=rl.ControllerConfig(num_steps=30, eval_every=20, eval_tasks=64, test_tasks=128, pass_at_k=0),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=4),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=5e-4, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=128, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
