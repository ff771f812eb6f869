"""Distillation on the policy's own samples: the quickstart's model learns to sort from a model three times its size.

The warm start is the quickstart's, which does not show sorting. At each position the policy is drawn to the teacher's whole
distribution; rewards are measured and do not train. `--algorithm.distill.divergence top_k` or `tokens` compares less of
it. First make the teacher, then name it::

    torchtitan-rl train configs/letter_sort_teacher.py
    torchtitan-rl train configs/distill.py --roles.teacher.model.assets runs/letter_sort_teacher/checkpoints/step-0/hf
"""

from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.algorithm.reductions import token_mean
from torchtitan_rl.config import (
    AdamWConfig,
    AlgorithmConfig,
    ControllerConfig,
    DistillConfig,
    GeneratorConfig,
    ModelConfig,
    Qwen3Shape,
    RoleConfig,
    RolesConfig,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    SupervisedConfig,
    TrainerConfig,
)
from torchtitan_rl.tasks.letter_sort import LetterSort

TEACHER = Qwen3Shape(
    vocab_size=64, dim=192, n_layers=6, n_heads=6, n_kv_heads=3, head_dim=32, hidden_dim=576, max_seq_len=512
)


def config() -> RunConfig:
    config = RunConfig(
        name="distill",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=ModelConfig(
            assets="chars",
            shape=Qwen3Shape(
                vocab_size=64,
                dim=128,
                n_layers=4,
                n_heads=4,
                n_kv_heads=2,
                head_dim=32,
                hidden_dim=384,
                max_seq_len=512,
            ),
        ),
        supervised=SupervisedConfig(
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=AlgorithmConfig(
            tasks_per_step=32,
            group_size=8,
            loss_fn=importance_sampling,
            reduction=token_mean,  # the loss is for divergence="tokens"
            distill=DistillConfig(divergence="full"),
            schedule=ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=ControllerConfig(num_steps=140, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=TrainerConfig(optimizer=AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        roles=RolesConfig(
            teacher=RoleConfig(
                model=ModelConfig(assets="chars", shape=TEACHER, pretrained=True),
                trainer=TrainerConfig(max_tokens_per_microbatch=16384),
            )
        ),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = config.roles.teacher.trainer.training.seq_len = 64
    return config
