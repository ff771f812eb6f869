"""Training on groups whose siblings compute their prompt once, beside the same groups packed whole.

    .venv/bin/python -m benchmarks.shared_prefix [--prompt 512] [--siblings 8] [--completion 64] [--groups 1]

One trainer in a process of its own has two clients, `trainer.shared_prefix` "off" and "auto", which take turns on the
same data: an optimizer step with GRPO's loss, and a forward that scores. The first round warms up and does not count.
Wall time is what a run has; the processor seconds of all processes say the same on a machine that others use too.
`--shape quickstart` has the quickstart's model. `--always` shares whatever the estimate says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from statistics import median

import numpy
import psutil
import torch

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.dispatch.shared_plan import PrefixCost, plan_siblings, prefix_cost
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.tools.bench.workload import SHAPES
from torchtitan_rl.types import Datum

_QUICKSTART = rl.Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=8192
)


def groups(args: argparse.Namespace, vocab_size: int, draw: torch.Generator) -> list[Datum]:
    """Groups of siblings with a prompt and an advantage each. Token weights sum to 1."""
    data, num_trained = [], args.groups * args.siblings * args.completion
    for number in range(args.groups):
        prompt_T = torch.randint(3, vocab_size, (args.prompt,), generator=draw)
        for _ in range(args.siblings):
            tokens = torch.cat([prompt_T, torch.randint(3, vocab_size, (args.completion,), generator=draw)])
            mask_T = (torch.arange(len(tokens) - 1) >= args.prompt - 1).float()
            inputs = {
                "loss_mask": mask_T,
                "token_weights": mask_T / num_trained,
                "advantages": mask_T * torch.randn((), generator=draw),
                "sampling_logprobs": mask_T * -math.log(vocab_size),
            }
            turns = [(0, args.prompt - 1, args.completion)]
            data.append(
                Datum(tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs=inputs, group=number, turns=turns)
            )
    return data


def now() -> numpy.ndarray:
    """Seconds on the clock, and processor seconds of this process and all that it started."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return numpy.array([time.perf_counter(), sum(each.user + each.system for each in times)])


async def measure(args: argparse.Namespace) -> dict:
    shape = _QUICKSTART if args.shape == "quickstart" else SHAPES["qwen3"][args.shape]
    shape.max_seq_len = max(shape.max_seq_len, args.prompt + args.completion)
    config = rl.TrainerConfig(
        optimizer=rl.AdamWConfig(lr=1e-6), max_tokens_per_microbatch=args.max_tokens, shared_prefix="auto"
    )
    config.training.seq_len, config.training.max_norm = args.prompt + args.completion, 1.0
    cost = PrefixCost(pair=0.0, group=0.0) if args.always else prefix_cost(config, shape)
    launcher = ActorLauncher(log_dir=None, start_timeout_s=600, call_timeout_s=1200)
    seconds: dict[str, list[numpy.ndarray]] = {
        f"{part} {side}": [] for part in ("step", "score") for side in ("off", "auto")
    }
    try:
        mesh = await launcher.start_trainer(config, rl.ModelConfig(shape=shape), role="policy", seed=0)
        clients = {
            side: MeshTrainingClient(
                mesh,
                max_tokens_per_microbatch=args.max_tokens,
                max_datum_tokens=config.training.seq_len,
                temperature=1.0,
                vocab_size=shape.vocab_size,
                prefix_cost=side_cost,
            )
            for side, side_cost in (("off", None), ("auto", cost))
        }
        for repeat in range(args.repeats + 1):
            data = groups(args, shape.vocab_size, torch.Generator().manual_seed(repeat))
            objective = policy_objective(presets.grpo(), data[0].loss_inputs)
            for side in sorted(clients, reverse=repeat % 2 == 0):
                client = clients[side]
                start = now()
                await client.forward(data)
                scored = now()
                await asyncio.gather(client.forward_backward(data, objective), client.optim_step())
                if repeat:
                    seconds[f"score {side}"].append(scored - start)
                    seconds[f"step {side}"].append(now() - scored)
    finally:
        await launcher.stop()
    plan = plan_siblings(data, 1, args.max_tokens, cost)
    result: dict = {"shared_frac": plan.shared_frac, "tokens": sum(map(len, data)), "shared": sum(plan.shared.values())}
    for part in ("step", "score"):
        off, auto = (numpy.array(seconds[f"{part} {side}"]) for side in ("off", "auto"))
        for column, kind in enumerate(("wall", "processor")):
            ratios = auto[:, column] / off[:, column]
            result[f"{part}, {kind}"] = {
                "off_s": median(off[:, column]),
                "auto_s": median(auto[:, column]),
                "ratio": median(ratios),
                "ratios": [min(ratios), max(ratios)],
            }
    before, after = (sum(map(cost.alone, map(len, data))), 0.0)
    for group in range(args.groups):
        group_lengths = [len(datum) for datum in data if datum.group == group]
        after += cost.together(args.prompt - 1, group_lengths)
    return result | {"estimate": after / before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES["qwen3"], "quickstart"], default="3m")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--completion", type=int, default=64)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--always", action="store_true")
    result = asyncio.run(measure(parser.parse_args()))
    print(json.dumps(result, default=float, indent=1))


if __name__ == "__main__":
    main()
