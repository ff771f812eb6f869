"""The base model in float64 with transformers, for the checks that `--weights` makes possible."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tinker import types


class Reference:
    """A causal language model in float64 on the CPU, with what it takes to train it like the server says it trains."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
        self.model.eval()
        # torch gives the padding token's row no gradient; a server knows no padding.
        self.model.get_input_embeddings().padding_idx = None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)

    def scores(self, tokens: Sequence[int], targets: Sequence[int]) -> torch.Tensor:
        """Log-probability of every target after the tokens up to its position: [tokens], float64."""
        logits = self.model(torch.as_tensor([list(tokens)])).logits[0].log_softmax(-1)
        return logits.gather(1, torch.as_tensor(list(targets)).unsqueeze(1)).squeeze(1)

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-probability of every token but the first: [tokens - 1]."""
        with torch.no_grad():
            return self.scores(tokens[:-1], tokens[1:]).numpy()

    def step(self, data: Sequence[types.Datum], params: types.AdamParams) -> None:
        """Cross-entropy of these datums, then torch.optim.AdamW with these hyperparameters."""
        self.optimizer.zero_grad()
        for one in data:
            inputs = {name: torch.as_tensor(value.to_numpy()) for name, value in one.loss_fn_inputs.items()}
            logp = self.scores(one.model_input.to_ints(), inputs["target_tokens"].tolist())
            (-(logp * inputs["weights"].double()).sum()).backward()
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), params.grad_clip_norm)
        self.optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self.optimizer.step()
