"""Repairing programs: a 0.8M-parameter Qwen3 learns to run a failing test before it mends a program, on two CPU cores.

The warm start shows both ways to answer: three demonstrations in ten run the test and repair the program, the others
give it back as it is. That running the test pays is learned from the reward alone, which comes from programs that ran
in a sandbox (docs/sandbox.md); `--task.sandbox.kind none` does without bubblewrap.

Differs from the quickstart:
- task: Repair.Config(sandbox=SandboxConfig(kind="bubblewrap")), not LetterSort.Config()
- supervised.num_steps: 250, not 300
- supervised.batch_size: 32, not 64
- algorithm.tasks_per_step: 16, not 32
- controller.num_steps: 20, not 160
- controller.eval_every: 10, not 20
- controller.eval_tasks: 128, not 256
- controller.test_tasks: 256, not 512
- sampling.max_prompt_tokens: 32, not 16
- sampling.max_turns: 4, not 8
- sampling.max_rollout_tokens: 62, not 0; prompt 24, call 6, its answer 13, answer 4: room for one more call
- trainer.optimizer.lr: 0.0005, not 0.001
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.tasks.program_repair import Repair
from torchtitan_rl.tasks.sandbox.config import SandboxConfig

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="repair",
        task=Repair.Config(sandbox=SandboxConfig(kind="bubblewrap")),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=250,
            batch_size=32,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.grpo(
            tasks_per_step=16,
            reduction=reductions.token_mean,
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=20, eval_every=10, eval_tasks=128, test_tasks=256, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=32, max_tokens=12, max_turns=4, max_rollout_tokens=62),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=5e-4, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
