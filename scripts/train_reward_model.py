"""A reward model for `configs/reward_model.py`: a classifier that regresses letter sort's reward on made-up answers.

    .venv/bin/python scripts/train_reward_model.py                       # 3,000 steps: minutes
    torchtitan-rl train configs/reward_model.py --roles.reward-model.model.assets runs/letter_sort_reward_model

The answers are those of `letter_sort.made_up_answer`. Writes a Hugging Face directory that
`AutoModelForSequenceClassification` reads.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchtitan_rl.config.load import load_config
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.model.files import assets_dir, load_tokenizer, pad_token_id
from torchtitan_rl.tasks.letter_sort import LetterSort, made_up_answer
from torchtitan_rl.types import Datum, LossInputs, OptimParams

CONFIG = Path(__file__).parents[1] / "configs" / "reward_model.py"


def squared_error(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of w (V - reward)^2; w is 0 except at the last token of a sequence."""
    return (inputs.token_weights * (inputs.predicted_values - inputs.rewards).square()).sum(), {}


def examples(family: LetterSort, tokenizer, split: str, seed: int) -> Iterator[tuple[list[int], float]]:
    """(tokens of prompt and answer, reward), without end; the tasks of the validation split repeat."""
    rng, index, num_tasks = random.Random(seed), 0, family.num_tasks(split)
    while True:
        task = family.task(split, seed * 2**32 + index if num_tasks is None else index % num_tasks)
        answer, index = made_up_answer(task, rng), index + 1
        (reward,) = family.reward(task, [answer])
        yield [*tokenizer.encode(f"{task.prompt}{answer}", add_special_tokens=False), tokenizer.eos_token_id], reward


def datum(tokens: list[int], reward: float, weight: float) -> Datum:
    sequence_T, last_T = torch.tensor(tokens), torch.zeros(len(tokens))
    last_T[-1] = 1.0
    inputs = {"token_weights": weight * last_T, "loss_mask": last_T, "rewards": reward * last_T}
    return Datum(tokens=sequence_T, target_tokens=sequence_T, loss_inputs=inputs)


async def train(directory: Path, *, num_steps: int, batch_size: int, lr: float, seed: int) -> float:
    """Trains the classifier and writes it. Returns the correlation of its scores with the rewards of 512 made-up
    answers to validation tasks."""
    config = load_config(str(CONFIG))
    trainer, model = config.trainers()["reward_model"]
    family, tokenizer = config.task.build(), load_tokenizer(assets_dir(model))
    with tempfile.TemporaryDirectory() as logs:
        launcher = LocalLauncher(log_dir=logs, start_timeout_s=300, call_timeout_s=600)
        try:
            mesh: Any = await launcher.start_trainer(trainer, model, role="critic", seed=seed)
            client = MeshTrainingClient(
                mesh,
                max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
                max_datum_tokens=trainer.training.seq_len,
                temperature=1.0,
                vocab_size=model.shape.vocab_size,
            )
            stream = examples(family, tokenizer, "train", seed)
            for step in range(num_steps):
                data = [datum(*next(stream), weight=1 / batch_size) for _ in range(batch_size)]
                trained = client.forward_backward(data, squared_error)
                rate = lr * min(1.0, (step + 1) / 20) * max(0.02, 1 - step / num_steps)
                await client.optim_step(OptimParams(lr=rate))
                if step % 50 == 0 or step == num_steps - 1:
                    print(f"step {step + 1}/{num_steps}  squared error {(await trained).loss:.4f}", flush=True)
            held_out = examples(family, tokenizer, "validation", seed)
            sequences, rewards = zip(*(next(held_out) for _ in range(512)))
            output = await client.forward([datum(tokens, 0.0, 1.0) for tokens in sequences])
            scores = torch.stack([values_T[-1] for values_T in output.values])
            await client.save_hf_model(directory, eos=tokenizer.eos_token_id, pad=pad_token_id(tokenizer))
        finally:
            await launcher.stop()
    return float(torch.corrcoef(torch.stack([scores, torch.tensor(rewards)]))[0, 1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/letter_sort_reward_model"))
    parser.add_argument("--num-steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    correlation = asyncio.run(
        train(args.output_dir, num_steps=args.num_steps, batch_size=args.batch_size, lr=args.lr, seed=args.seed)
    )
    print(f"correlation with the reward on validation tasks: {correlation:.3f}; written to {args.output_dir}")
