"""transformers' own model of a `config.json`: what everything else is compared with."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from torchtitan_rl.tools.certify.drawn_weights import draw_weights

__all__ = ["ReferenceModel", "tensors_of"]


class ReferenceModel:
    """A causal language model of transformers, in float32, with its plainest attention."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @classmethod
    def drawn(cls, hf: dict[str, Any], directory: Path) -> ReferenceModel:
        """A model with drawn weights, which transformers writes to the directory as safetensors, beside `hf` as the
        config.json."""
        from transformers import AutoConfig, AutoModelForCausalLM

        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(hf, indent=1))
        config = AutoConfig.from_pretrained(str(directory))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        draw_weights(model)
        _save(model, directory)
        (directory / "config.json").write_text(json.dumps(hf, indent=1))  # in the spelling of the user's
        return cls(model)

    @classmethod
    def read(cls, directory: Path) -> ReferenceModel:
        """The model of a directory. Raises ValueError for tensors that are missing, or that the model does not have."""
        from transformers import AutoModelForCausalLM

        model, loading = AutoModelForCausalLM.from_pretrained(
            str(directory), attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        if problems := {kind: sorted(map(str, names)) for kind, names in loading.items() if names}:
            raise ValueError(f"directory={str(directory)!r}: transformers has {problems}")
        return cls(model)

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """The log-probability of every token but the first (T - 1,)."""
        with torch.no_grad():
            return self._logprobs(tokens)

    def gradients(self, documents: list[list[int]], weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the names of the safetensors, the gradient of minus the weighted sum of the documents'
        log-probabilities."""
        self.model.zero_grad()
        for tokens, weights_T in zip(documents, weights, strict=True):
            (-self._logprobs(tokens) * weights_T).sum().backward()
        gradient_model = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter, original in zip(gradient_model.parameters(), self.model.parameters(), strict=True):
                parameter.copy_(torch.zeros(()) if original.grad is None else original.grad)
        with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as scratch:
            _save(gradient_model, Path(scratch))  # which takes apart what transformers keeps fused, such as experts
            return tensors_of(Path(scratch))

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The states (T, D) that enter the head."""
        with torch.no_grad():
            return self.model.model(torch.tensor([tokens])).last_hidden_state[0]

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest token after each of the prompts and so on, and by how much its logit is the largest."""
        completions, margins = [], []
        for prompt in prompts:
            tokens, prompt_margins = list(prompt), []
            for _ in range(num_tokens):
                with torch.no_grad():
                    best = self.model(torch.tensor([tokens])).logits[0, -1].topk(2)
                tokens.append(int(best.indices[0]))
                prompt_margins.append(float(best.values[0] - best.values[1]))
            completions.append(tokens[len(prompt) :])
            margins.append(prompt_margins)
        return completions, margins

    def _logprobs(self, tokens: list[int]) -> torch.Tensor:
        sequence = torch.tensor([tokens])
        logits = self.model(sequence).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, sequence[0, 1:, None])[:, 0]


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's safetensors."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def _save(model: Any, directory: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(str(directory))
