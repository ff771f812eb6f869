"""Several turns: a 0.8M-parameter Qwen3 learns to call a calculator, on two CPU cores in a minute and a half.

The warm start shows both ways to answer: three demonstrations in ten call the calculator and copy what it says, the
others repeat the problem's first number, which is wrong. So the policy that follows can call, but mostly does not.
That calling pays is learned from the reward alone: a choice between two known ways, not a new skill (docs/dev/log.md).

Differs from the quickstart:
- task: Calculator.Config(min_digits=1, max_digits=2), not LetterSort.Config()
- supervised.num_steps: 450, not 300
- controller.num_steps: 60, not 160
- sampling.max_prompt_tokens: 12, not 16
- sampling.max_tokens: 16, not 12
- sampling.max_turns: 4, not 8
- sampling.max_rollout_tokens: 48, not 0; prompt 6, call 7, its value 5, answer 5: room for two more calls
- trainer.optimizer.lr: 0.0005, not 0.001
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.calculator import Calculator

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="calculator",
        task=Calculator.Config(min_digits=1, max_digits=2, tool_demonstrations=0.3),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=450,
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
        controller=rl.ControllerConfig(num_steps=60, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=12, max_tokens=16, max_turns=4, max_rollout_tokens=48),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=5e-4, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
