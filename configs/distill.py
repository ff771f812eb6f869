"""Distillation on the policy's own samples: the quickstart's model learns to sort from a model three times its size.

At each position the policy is drawn to the teacher's whole distribution; rewards are measured and do not train.
`--algorithm.distill.divergence top_k` or `tokens` compares less of it. First make the teacher, then name it::

    torchtitan-rl train configs/letter_sort_teacher.py
    torchtitan-rl train configs/distill.py --roles.teacher.model.assets runs/letter_sort_teacher/checkpoints/step-0/hf

Differs from the quickstart:
- algorithm.advantage_fn: group_centered, not grpo; not read where a teacher alone trains
- algorithm.loss_fn: importance_sampling, not ppo; for `tokens`
- algorithm.loss_config: {}, not {"clip_low": 0.2, "clip_high": 0.2}
- algorithm.distill: DistillConfig(divergence="full"), not None
- controller.num_steps: 140, not 160
- roles.teacher: RoleConfig(trainer=TrainerConfig(max_tokens_per_microbatch=16384,
  training=TrainingConfig(seq_len=64)), model=ModelConfig(shape=Qwen3Shape(vocab_size=64, dim=192, n_layers=6,
  n_heads=6, n_kv_heads=3, head_dim=32, hidden_dim=576, max_seq_len=512), pretrained=True)), not None
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)
TEACHER = rl.Qwen3Shape(
    vocab_size=64, dim=192, n_layers=6, n_heads=6, n_kv_heads=3, head_dim=32, hidden_dim=576, max_seq_len=512
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="distill",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.distill(
            tasks_per_step=32,
            distill={"divergence": "full"},
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=140, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        roles=rl.RolesConfig(
            teacher=rl.RoleConfig(
                model=rl.ModelConfig(assets="chars", shape=TEACHER, pretrained=True),
                trainer=rl.TrainerConfig(max_tokens_per_microbatch=16384),
            )
        ),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = config.roles.teacher.trainer.training.seq_len = 64
    return config
