"""The quickstart's model trains on a reward model: the task's own reward is measured and does not train.

A frozen classifier on a mesh of its own scores each rollout. First make the classifier, then name it::

    .venv/bin/python scripts/train_reward_model.py
    torchtitan-rl train configs/reward_model.py --roles.reward-model.model.assets runs/letter_sort_reward_model

Accuracies of evaluations are by the task's own reward: .035 after the warm start, .469 after 120 steps. By a
classifier that was trained for 800 steps only, accuracy falls: the policy finds what the classifier mistakes for good
(docs/rewards.md has the figures).

Differs from the quickstart:
- task.min_letters: 3, not 4; a smaller task, for a few minutes
- task.max_letters: 4, not 6
- supervised.num_steps: 150, not 300
- controller.num_steps: 120, not 160
- roles.reward_model: RewardModelConfig(trainer=TrainerConfig(max_tokens_per_microbatch=16384,
  training=TrainingConfig(seq_len=64)), model=ModelConfig(shape=Qwen3Shape(vocab_size=64, dim=64, n_layers=3,
  n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=192, max_seq_len=512), pretrained=True), task_weight=0.0), not None
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)
CLASSIFIER = rl.Qwen3Shape(
    vocab_size=64, dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=192, max_seq_len=512
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="reward_model",
        task=LetterSort.Config(min_letters=3, max_letters=4),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=150,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.grpo(
            tasks_per_step=32,
            reduction=reductions.token_mean,
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=120, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        roles=rl.RolesConfig(
            reward_model=rl.RewardModelConfig(
                model=rl.ModelConfig(assets="chars", shape=CLASSIFIER, pretrained=True),
                trainer=rl.TrainerConfig(max_tokens_per_microbatch=16384),
                weight=1.0,
                task_weight=0.0,
            )
        ),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = config.roles.reward_model.trainer.training.seq_len = 64
    return config
