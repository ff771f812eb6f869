"""Checks of who chooses a mixture's experts in training: settings under which the generator's choice is not known."""

from __future__ import annotations

from torchtitan_rl import platform
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families import DecoderShape

__all__ = ["check_expert_routing"]


def check_expert_routing(config: RunConfig, shape: DecoderShape) -> None:
    """Raises ValueError for the experts of generators in a run that cannot record or use them. `config` is settled."""
    generator, routing = config.generator, config.algorithm.expert_routing
    field = f"algorithm.expert_routing={routing!r}"
    if routing != "own" and shape.experts is None:
        raise ValueError(f"{field}: the model has no experts; use 'own'")
    if routing != "own" and not generator.record_routing:
        raise ValueError(
            f"generator.record_routing={generator.record_routing}: {field} needs the generator's experts; leave "
            "record_routing out"
        )
    if not generator.record_routing:
        return
    field = f"generator.record_routing=True{'' if routing == 'own' else f' ({field})'}"
    if shape.experts is None:
        raise ValueError(f"{field}: the model has no experts; leave it out")
    runs_v2 = generator.model_runner == "auto" and platform.device_type() == "cuda"
    if generator.model_runner == "v2" or runs_v2:
        raise ValueError(
            f"generator.model_runner={generator.model_runner!r}: is vLLM's second model runner, which does not say "
            f"where a request's tokens are, and {field}; use 'v1'"
        )
    if generator.enforce_eager is False:
        raise ValueError(
            f"generator.enforce_eager=False: routers that record in a CUDA graph are not tested, and {field}; use True"
        )
    if config.trainer.shared_prefix != "off" and routing != "own":
        raise ValueError(
            f"trainer.shared_prefix={config.trainer.shared_prefix!r}: computes a prompt once for all siblings, and "
            f"{field} has the experts of each; use 'off'"
        )
    if config.trainer.compile.enable and routing != "own":
        raise ValueError(
            f"trainer.compile.enable=True: compiled routers with the generator's experts are not tested, and {field}; "
            "use False"
        )
