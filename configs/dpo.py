"""Direct preference optimisation, with RPO's term, on letter sorting, from the quickstart's warm start.

A pair is the right order of a word's letters and the same with two letters exchanged, made by the task family with a
seed. Nothing is sampled from the policy but in the evaluations before and after.

Differs from the quickstart:
- task.pairs: True, not False
- preference: PreferenceConfig(num_steps=200, loss_fn=dpo, loss_config={"beta": 0.1}, sft_coef=0.2, lr=0.001,
  schedule=ScheduleConfig(warmup_steps=10), betas=(0.9, 0.99), eval_pairs=256), not None
- roles.reference: RoleConfig(), not None
- controller.num_steps: 0, not 160; with more, reinforcement follows
- controller.pass_at_k: 0, not 8
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import pair_losses, presets, reductions
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="dpo",
        task=LetterSort.Config(min_letters=4, max_letters=6, pairs=True),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        preference=rl.PreferenceConfig(
            num_steps=200,
            batch_size=64,
            loss_fn=pair_losses.dpo,
            loss_config={"beta": 0.1},
            sft_coef=0.2,
            lr=1e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=10),
            eval_pairs=256,
        ),
        algorithm=presets.grpo(
            tasks_per_step=32,
            reduction=reductions.token_mean,
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=0, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=0),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.roles.reference = rl.RoleConfig()
    config.trainer.training.seq_len = 64
    return config
