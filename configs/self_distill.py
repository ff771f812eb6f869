"""Self-distillation: the quickstart's model learns to sort letters without a reward.

The warm start shows two forms, a wrong order as in the quickstart and, in prompts with a hint (`szyci:yzisc=`), copying
the hint. Sorting is in neither. Then the policy answers plain prompts, and the policy as it was after the warm start
scores each of those tokens under a prompt with the right answer as the hint.

Differs from the quickstart:
- supervised.task: LetterSort.Config(hinted_demonstrations=0.5), not None
- algorithm.workflow: SelfDistill(workflow=single_turn, prompt=answer_as_hint), not None
- algorithm.precomputed_advantages: "require", not "auto"
- algorithm.advantage_fn: group_centered, not grpo; not read where turns carry their advantages
- algorithm.loss_fn: importance_sampling, not ppo
- algorithm.loss_config: {}, not {"clip_low": 0.2, "clip_high": 0.2}
"""

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.rollout.self_distill import self_distill
from torchtitan_rl.tasks.letter_sort import LetterSort, hinted
from torchtitan_rl.types import Rollout

SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


def answer_as_hint(rollout: Rollout) -> str:
    """What the teacher reads in place of `szyci=`."""
    return hinted(rollout.task.prompt.removesuffix("="), rollout.task.answer)


def config() -> rl.RunConfig:
    config = rl.RunConfig(
        name="self_distill",
        task=LetterSort.Config(min_letters=4, max_letters=6),
        model=rl.ModelConfig(assets="chars", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            task=LetterSort.Config(min_letters=4, max_letters=6, hinted_demonstrations=0.5),
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=presets.self_distill(
            workflow=self_distill(single_turn, prompt=answer_as_hint),
            tasks_per_step=32,
            schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
        ),
        controller=rl.ControllerConfig(num_steps=160, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=12),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=1e-3, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=512, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
