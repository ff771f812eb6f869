"""From the sampling parameters of a request to those of a completion."""

from __future__ import annotations

from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.errors import invalid
from torchtitan_rl.serve.openai.requests import Sampled
from torchtitan_rl.types import NEUTRAL, SamplingParams

__all__ = ["sampling_params"]

_MAX_STOPS = 64
_MAX_STOP_TOKENS = 256


def sampling_params(
    request: Sampled, policy: Policy, stop_token_ids: list[int], room: int, structure: str = "", *, own: bool
) -> SamplingParams:
    """How a completion is drawn: by the policy's settings, and the request's where the request may decide.

    `room` is what the context leaves, in tokens, `structure` what the text must be. `own`: the client decides about
    temperature and seed. Otherwise the run does: where rollouts train, another temperature and whatever alters the
    distribution is refused with status 400, and where they are evaluated, the evaluation's temperature holds.
    """
    if len(request.stops) > _MAX_STOPS or not all(request.stops):
        raise invalid(f"stop: has an empty text, or more than {_MAX_STOPS}; give texts that end a completion", "stop")
    if len(request.stop_token_ids or ()) > _MAX_STOP_TOKENS:
        raise invalid(f"stop_token_ids: has more than {_MAX_STOP_TOKENS}; give fewer", "stop_token_ids")
    altered = dict(policy.altered)
    for name, off in NEUTRAL.items():
        value = getattr(request, name)
        if value is None or value in off:
            continue
        if policy.for_training:
            raise invalid(
                f"{name}={value}: this session trains, and log-probabilities would not be those of the policy; leave "
                f"{name} out, or name it in external(ignored=...)",
                name,
                "unsupported_parameter",
            )
        altered[name] = value
    temperature = policy.temperature
    if request.temperature is not None:
        if own:
            temperature = request.temperature
        elif policy.for_training and request.temperature != temperature:
            raise invalid(
                f"temperature={request.temperature:g}: this session trains at algorithm.temperature={temperature:g}; "
                "leave it out, or name it in external(ignored=...)",
                "temperature",
                "unsupported_parameter",
            )
    limits = [policy.max_tokens, room, *([] if request.limit is None else [request.limit])]
    return SamplingParams(
        max_tokens=min(limits),
        temperature=temperature,
        seed=request.seed if own else None,
        stop_token_ids=[*stop_token_ids, *policy.stop_token_ids, *(request.stop_token_ids or [])],
        stop=[*policy.stop, *request.stops],
        ignore_eos=bool(request.ignore_eos),
        structure=structure,
        **altered,  # type: ignore[arg-type]  # top_k is a whole number
    )
