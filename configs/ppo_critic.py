"""PPO with a critic on the quickstart's task and warm start: advantages per token by GAE.

Differs from the quickstart:
- algorithm.group_size: 2, not 8; siblings are not compared, so there are few of them and more tasks instead
- algorithm.tasks_per_step: 256, not 32
- algorithm.tasks_per_minibatch: 128, not 0; two optimizer steps per batch, so that not every ratio is 1
- algorithm.advantage_fn: group_centered, not grpo; GAE takes its place
- algorithm.gae_lambda: 0.95, not 1.0
- algorithm.critic_loss_config: {"clip": 0.5}, not {}
- roles.critic: RoleConfig(trainer=TrainerConfig(optimizer=AdamWConfig(lr=0.001, betas=(0.9, 0.99)),
  max_tokens_per_microbatch=16384, training=TrainingConfig(seq_len=64))), not None
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="ppo_critic",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.ppo(
            tasks_per_step=256,
            tasks_per_minibatch=128,
            group_size=2,
            critic_loss_config={"clip": 0.5},
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=160, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        roles=rl.RolesConfig(
            critic=rl.RoleConfig(
                trainer=rl.TrainerConfig(
                    optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384
                )
            )
        ),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = config.roles.critic.trainer.training.seq_len = 64
    return config
