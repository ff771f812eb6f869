"""A supervised and a reinforcement loop, written with Tinker's SDK alone, against a server of one's own.

    torchtitan-rl serve-tinker configs/quickstart.py --lora-rank 0       # here one model trains all parameters
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python docs/tinker_client.py [--rl-steps 160]

The task is the quickstart's: sort the letters of a word, `szyci=` -> `cisyz`. The supervised phase shows the form of an
answer, letters in an order that is never the right one; that letters are to be sorted is learned from the reward alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import string
import time
from collections import Counter

import tinker
import torch
from tinker import types

WARM_STEPS, WARM_BATCH, WARM_LR = 300, 64, 3e-3
TASKS, GROUP, LR = 32, 8, 1e-3
MAX_TOKENS = 12


def word(rng: random.Random) -> str:
    return "".join(rng.sample(string.ascii_lowercase, rng.randint(4, 6)))


def is_held_out(letters: str) -> bool:
    """One set of letters in ten is for validation alone, in any order."""
    return random.Random("".join(sorted(letters))).random() < 0.1


def words(rng: random.Random, number: int, *, held_out: bool = False) -> list[str]:
    return list(itertools.islice((w for w in iter(lambda: word(rng), "") if is_held_out(w) == held_out), number))


def wrong_order(rng: random.Random, letters: str) -> str:
    while (shuffled := "".join(rng.sample(letters, len(letters)))) == "".join(sorted(letters)):
        pass
    return shuffled


def reward(letters: str, said: str) -> float:
    """1 for the right answer, else up to 0.5 for pairs in order and letters kept."""
    pairs = [first <= second for first, second in itertools.combinations(said, 2)]
    if said == "".join(sorted(letters)) or not pairs:
        return float(bool(pairs))
    kept = sum((Counter(said) & Counter(letters)).values()) / max(len(said), len(letters))
    return 0.5 * sum(pairs) / len(pairs) * kept**2


def supervised(client: tinker.TrainingClient, tokenizer, steps: int = WARM_STEPS) -> None:
    rng = random.Random(0)
    for step in range(steps):
        data = []
        for letters in words(rng, WARM_BATCH):
            prompt = tokenizer.encode(f"{letters}=")
            tokens = prompt + tokenizer.encode(wrong_order(rng, letters)) + [tokenizer.eos_token_id]
            weights = torch.zeros(len(tokens) - 1)
            weights[len(prompt) - 1 :] = 1.0 / (WARM_BATCH * 6)
            inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": weights}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        lr = WARM_LR * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        gradient = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=lr, beta2=0.99, eps=1e-8, grad_clip_norm=1.0))
        gradient.result(), stepped.result()


def rollouts(sampler: tinker.SamplingClient, tokenizer, tasks: list[str], n: int, temperature: float) -> list:
    """(word, prompt, sequences) of each task; all are asked at once."""
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature)
    prompts = [tokenizer.encode(f"{letters}=") for letters in tasks]
    asked = [sampler.sample(types.ModelInput.from_ints(prompt), n, params) for prompt in prompts]
    return [(letters, prompt, future.result().sequences) for letters, prompt, future in zip(tasks, prompts, asked)]


def text_of(tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


def reinforced(groups: list, tokenizer) -> list[types.Datum]:
    """Advantages are rewards, centred and divided by the standard deviation of their group; the loss a token mean."""
    data, num_tokens = [], sum(len(said.tokens) for *_, group in groups for said in group)
    for letters, prompt, group in groups:
        rewards = torch.tensor([reward(letters, text_of(tokenizer, said.tokens)) for said in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for said, advantage in zip(group, advantages.tolist()):
            tokens, before = prompt + said.tokens, [0.0] * (len(prompt) - 1)
            inputs = {
                "target_tokens": torch.tensor(tokens[1:]),
                "logprobs": torch.tensor(before + list(said.logprobs)),
                "advantages": torch.tensor(before + [advantage / num_tokens] * len(said.tokens)),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def reinforcement(client: tinker.TrainingClient, tokenizer, steps: int) -> None:
    rng = random.Random(1)
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        groups = rollouts(sampler, tokenizer, words(rng, TASKS), GROUP, 1.0)
        lr = LR * min(1.0, (step + 1) / 5) * (1 - 0.9 * step / steps)
        gradient = client.forward_backward(reinforced(groups, tokenizer), "ppo")
        stepped = client.optim_step(types.AdamParams(learning_rate=lr, beta2=0.99, eps=1e-8, grad_clip_norm=1.0))
        gradient.result(), stepped.result()


def accuracy(client: tinker.TrainingClient, tokenizer, number: int = 256) -> float:
    sampler = client.save_weights_and_get_sampling_client().result()
    found = rollouts(sampler, tokenizer, words(random.Random(2), number, held_out=True), 1, 0.0)
    return sum(text_of(tokenizer, said.tokens) == "".join(sorted(letters)) for letters, _, (said,) in found) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS)
    parser.add_argument("--rl-steps", type=int, default=160)
    args = parser.parse_args()
    service = tinker.ServiceClient()
    base_model = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    client = service.create_lora_training_client(base_model).result()
    tokenizer = client.get_tokenizer()
    begun = time.monotonic()
    supervised(client, tokenizer, args.warm_steps)
    warm, warm_s = accuracy(client, tokenizer), time.monotonic() - begun
    reinforcement(client, tokenizer, args.rl_steps)
    seconds = time.monotonic() - begun - warm_s
    print(
        json.dumps(
            {
                "accuracy after the warm start": round(warm, 3),
                "accuracy after reinforcement": round(accuracy(client, tokenizer), 3),
                "warm start, s": round(warm_s, 1),
                "reinforcement, s": round(seconds, 1),
                "state": client.save_state("final", overwrite=True).result().path,
            }
        )
    )


if __name__ == "__main__":
    main()
