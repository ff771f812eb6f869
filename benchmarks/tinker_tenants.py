"""Two tenants of a Tinker server that sample and train in turn, beside one alone.

    .venv/bin/python -m benchmarks.tinker_tenants [--rounds 20] [--samples 64] [--merged]

Each tenant is a client with a LoRA model of its own: it saves weights to sample from, samples a batch, and trains on
it, again and again. First one tenant runs alone, then both run at once, then one alone again. Prints one line of JSON:
rounds per second of each, and the rate of the slower tenant over that of one alone. `--merged`: the server merges
adapters into the weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types

from tests.integration.tinker_server import tinker_server

PROMPT = [22, 20, 21, 16, 20, 21]


class Tenant:
    """A client with one LoRA model."""

    def __init__(self, url: str, base_model: str, seed: int, samples: int) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key="tml-tenant")
        self._client = self._service.create_lora_training_client(base_model, rank=16, seed=seed).result()
        self._samples = samples

    def round(self) -> None:
        sampler = self._client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=32, temperature=1.0, seed=0)
        prompt = types.ModelInput.from_ints(PROMPT)
        sampled = sampler.sample(prompt, self._samples, params).result(120)
        data = []
        for sequence in sampled.sequences:
            tokens = torch.tensor(PROMPT + list(sequence.tokens))
            inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": torch.full((len(tokens) - 1,), 1e-3)}
            data.append(
                types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
            )
        self._client.forward_backward(data, "cross_entropy")
        self._client.optim_step(types.AdamParams(learning_rate=1e-4)).result(120)

    def rate(self, rounds: int) -> float:
        """Rounds per second."""
        began = time.perf_counter()
        for _ in range(rounds):
            self.round()
        return rounds / (time.perf_counter() - began)

    def close(self) -> None:
        self._service.close("success")


def measure(rounds: int, samples: int, merged: bool) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        options = ("--merged",) if merged else ()
        with tinker_server(Path(directory), "--lora-rank", "16", *options) as (url, _):
            rest = tinker.RestClient(base_url=url, api_key="tml-tenant")
            base_model = rest.get_server_capabilities().result(30).supported_models[0].model_name
            tenants = [Tenant(url, base_model, seed, samples) for seed in (1, 2)]
            for tenant in tenants:
                tenant.rate(2)
            alone = [tenants[0].rate(rounds)]
            together: dict[int, float] = {}
            threads = [
                threading.Thread(target=lambda i=i: together.update({i: tenants[i].rate(rounds)})) for i in (0, 1)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            alone.append(tenants[0].rate(rounds))
            for tenant in tenants:
                tenant.close()
    alone_per_s = sum(alone) / 2
    return {
        "merged": merged,
        "alone, rounds/s": [round(rate, 3) for rate in alone],
        "together, rounds/s": [round(together[i], 3) for i in (0, 1)],
        "of one alone": round(min(together.values()) / alone_per_s, 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--merged", action="store_true")
    args = parser.parse_args()
    print(json.dumps(measure(args.rounds, args.samples, args.merged)))
