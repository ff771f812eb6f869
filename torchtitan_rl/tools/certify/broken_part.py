"""Which part of a torchtitan model computes otherwise than transformers' model with the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.config import ParallelismConfig

from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.attention import PackedDocuments
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.tools.certify.reference_model import tensors_of
from torchtitan_rl.tools.certify.subject import Subject

__all__ = ["broken_part", "plain_model"]

_PROJECTIONS = (".q_proj", ".k_proj", ".q_norm", ".k_norm")
_SAME = 2e-5
"""Outputs that differ by less than this, beside the largest one, are the same but for rounding."""


def plain_model(shape: DecoderShape) -> tuple[Any, Any]:
    """A family's model on one device, without weights, and its state-dict adapter."""
    view = SimpleNamespace(parallelism=ParallelismConfig(spmd_backend="partial_dtensor"))
    spec = training_spec(build_spec(ModelConfig(shape=shape)), view, attention="sdpa", chunk_bytes=2**20)
    model = spec.model.build()
    model.init_weights()
    return model, spec.state_dict_adapter(spec.model, None)


@torch.no_grad()
def broken_part(subject: Subject, tokens: list[int]) -> str:
    """The innermost part whose input is that of its counterpart in transformers and whose output is not, by
    torchtitan's name, such as `layers.0.attention.rope`."""
    model, adapter = plain_model(subject.shape)
    model.load_state_dict(adapter.from_hf(tensors_of(subject.directory)), strict=False)
    reference = subject.reference.model
    pairs = _pairs(model, adapter, reference)
    here = _Calls({name: part for name, part in model.named_modules() if name in pairs or name.endswith(".rope")})
    there = _Calls(
        {
            name: part
            for name, part in reference.named_modules()
            if name in pairs.values() or name.endswith((*_PROJECTIONS, "rotary_emb"))
        }
    )
    _run(model, tokens)
    subject.reference.hidden(tokens)
    here.stop()
    there.stop()
    for name in here.order:  # inner parts end before the parts that they are in
        attention, _, last = name.rpartition(".")
        if last == "rope":
            if not _rotated_alike(here, there, name, pairs[attention], reference):
                return f"{name} (its form or scaling, or the order of rows in wq and wk)"
        elif _broken(here, name, there, pairs[name]):
            return name
    return "lm_head"


class _Calls:
    """The tensors that went into each module and came out, in the order in which the modules ended."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self.inputs: dict[str, list[torch.Tensor]] = {}
        self.outputs: dict[str, list[torch.Tensor]] = {}
        self.order: list[str] = []
        self._hooks = [
            module.register_forward_hook(self._noting(name), with_kwargs=True) for name, module in modules.items()
        ]

    def _noting(self, name: str) -> Callable:
        def note(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            self.inputs[name] = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            self.outputs[name] = [x for x in outputs if isinstance(x, torch.Tensor)]
            self.order.append(name)

        return note

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _pairs(model: Any, adapter: Any, reference: Any) -> dict[str, str]:
    """Modules that hold the same weights: torchtitan's name -> transformers'. Also the parts of a layer that hold them,
    such as its attention."""
    ours, theirs = dict(model.named_modules()), dict(reference.named_modules())
    pairs: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        for hf_name in adapter.to_hf({name: tensor}):
            one, other = name.rpartition(".")[0], hf_name.rpartition(".")[0]
            if one in ours and other in theirs:
                pairs[one] = other
            parts, hf_parts = name.split("."), hf_name.split(".")
            if parts[0] == "layers" and hf_parts[:2] == ["model", "layers"]:
                pairs.setdefault(".".join(parts[:3]), ".".join(hf_parts[:4]))
    return pairs


def _run(model: Any, tokens: list[int]) -> None:
    hidden = model.tok_embeddings(torch.tensor([tokens]))
    for layer in model.layers.values():
        hidden = layer(hidden, PackedDocuments.build([len(tokens)]), torch.arange(len(tokens))[None])
    model.norm(hidden)


def _broken(here: _Calls, name: str, there: _Calls, counterpart: str) -> bool:
    """Whether equal inputs gave different outputs."""
    if counterpart not in there.outputs or not here.outputs[name]:
        return False
    output, expected = here.outputs[name][0], there.outputs[counterpart][0]
    if output.numel() != expected.numel():
        return False  # such as a router, which says its choice in two ways
    return _alike(here.inputs[name][0], there.inputs[counterpart][0]) and not _alike(output, expected)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() != other.numel():
        return False
    difference = (one.flatten().double() - other.flatten().double()).abs().max()
    return bool(difference <= _SAME * max(1e-3, float(other.abs().max())))


def _rotated_alike(here: _Calls, there: _Calls, rope: str, attention: str, reference: Any) -> bool:
    """Whether rotated queries and keys have the products that transformers' have. Products do not depend on the order
    in which a head's dimensions are stored. True also where they differ before they are rotated, and where transformers
    makes queries or keys by other parts than one projection each, such as latent attention's."""
    queries, keys = here.outputs[rope][:2]
    plain = [_before_rotation(there, attention, part) for part in ("q", "k")]
    rotate = getattr(sys.modules[type(reference.get_submodule(attention)).__module__], "apply_rotary_pos_emb", None)
    if rotate is None or plain[0] is None or plain[1] is None:
        return True
    # A rope may be given the part of each head that is rotated alone: the first dimensions.
    plain = [rows.view(*x.shape[:3], -1)[..., : x.shape[-1]] for rows, x in zip(plain, (queries, keys))]
    if not _alike(_products(*here.inputs[rope][:2]), _products(*plain)):
        return True
    cos, sin = next(there.outputs[name] for name in there.order if name.endswith("rotary_emb"))
    rotated = rotate(*plain, cos, sin, unsqueeze_dim=2)  # each model's own: the form of cos and sin is its affair
    return _alike(_products(queries, keys), _products(*rotated))


def _before_rotation(there: _Calls, attention: str, part: str) -> torch.Tensor | None:
    names = (f"{attention}.{part}_norm", f"{attention}.{part}_proj")
    return next((there.outputs[name][0] for name in names if name in there.outputs), None)


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    keys = keys.repeat_interleave(queries.shape[2] // keys.shape[2], 2)
    return torch.einsum("blnh,bmnh->bnlm", queries, keys)
