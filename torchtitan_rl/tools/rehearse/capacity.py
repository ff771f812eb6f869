"""How long a batch would take by a stated model of the hardware, and which part takes longest.

Matrix products cost 2 operations per parameter and token forward, 4 backward, and 2 more where the backward recomputes
the forward; causal attention costs 2 Q per pair of tokens and layer forward (Kaplan et al., 2020, section 2.1; half the
pairs are masked). Decoding reads the weights and the cache of all sequences once per token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.run import COLOCATION, RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.flops import forward_flops
from torchtitan_rl.model.memory import generator_parts
from torchtitan_rl.model.shape import kv_bytes_per_token, resolve_shape, state_bytes
from torchtitan_rl.tools.rehearse.hardware import REACHED, Hardware
from torchtitan_rl.tools.rehearse.links import Links
from torchtitan_rl.tools.rehearse.work import BatchWork, RoleWork

__all__ = ["Times", "batch_times", "link_seconds"]

_GIGA, _TERA = 1e9, 1e12


@dataclass(kw_only=True, slots=True)
class Times:
    """Seconds of a batch by part. `generate` and `train` hold what follows each other."""

    generate: dict[str, float] = field(default_factory=dict)
    train: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    """What overlaps with something in `train` that takes longer."""
    sync: float = 0.0
    overlaps: bool = False
    """Whether the next batch is generated while this one trains (`algorithm.max_policy_lag`)."""

    @property
    def total(self) -> float:
        halves = sum(self.generate.values()), sum(self.train.values())
        return self.sync + (max(halves) if self.overlaps else sum(halves))

    @property
    def limit(self) -> str:
        """The part that takes longest, of those that a batch waits for."""
        halves = [self.generate, self.train]
        if self.overlaps:
            halves = [max(halves, key=lambda half: sum(half.values()))]
        parts = {name: seconds for half in halves for name, seconds in half.items()} | {"weight sync": self.sync}
        return max(parts, key=parts.__getitem__)


def batch_times(
    config: RunConfig, work: BatchWork, links: dict[str, Links], sync_seconds: float, hardware: Hardware
) -> Times:
    """`links`: what each trainer role sends in the batch. All roles score before any trains. In both halves, roles on
    devices of their own work beside the policy, and the slowest counts; roles that share the policy's devices take
    turns with it."""
    times = Times(sync=sync_seconds, overlaps=config.algorithm.max_policy_lag > 0)
    times.generate = _generate(config, work, hardware)
    sharing = COLOCATION[config.roles.colocation]
    halves: tuple[dict[str, dict[str, float]], ...] = {"policy": {}}, {"policy": {}}  # by the first role on the devices
    for role, (trainer, model) in config.trainers().items():
        parts, hidden = _train(trainer, resolve_shape(model), work, work.roles[role], links[role], hardware)
        scored = _scored_share(trainer, work.roles[role])
        for half, share in zip(halves, (scored, 1 - scored)):
            turns = half.setdefault("policy" if role in sharing else role, {})
            turns |= {f"{role}: {name}": share * seconds for name, seconds in parts.items() if share}
        times.hidden |= {f"{role}: {name}": seconds for name, seconds in hidden.items()}
    train, beside = Counter[str](), Counter[str]()
    for half in halves:
        slowest = max(half.values(), key=lambda parts: sum(parts.values()))
        for parts in half.values():
            (train if parts is slowest else beside).update(parts)
    times.train, times.hidden = dict(train), times.hidden | beside
    return times


def link_seconds(links: Links, name: str, hardware: Hardware) -> tuple[str, float]:
    """(which link, seconds) of a purpose: within and between hosts at once, the slower one counts."""
    within = links.within.get(name, 0) / (hardware.within_gb_s * _GIGA * REACHED["network"])
    between = links.between.get(name, 0) / (hardware.between_gb_s * _GIGA * REACHED["network"])
    return ("between hosts", between) if between > within else ("within a host", within)


def _passes(trainer: TrainerConfig) -> int:
    """Training on a token in forwards of the token: a backward is two, and one more where activations are computed
    again."""
    return 3 + (trainer.activation_checkpoint == "full")


def _scored_share(trainer: TrainerConfig, role: RoleWork) -> float:
    """The share of a role's work that is scoring."""
    return role.scored_tokens / max(1, role.scored_tokens + _passes(trainer) * role.trained_tokens)


def _train(
    trainer: TrainerConfig, shape: DecoderShape, work: BatchWork, role: RoleWork, links: Links, hardware: Hardware
) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds by part, seconds that overlap with longer parts): FSDP's calls overlap with computing, tensor
    parallelism's do not."""
    tp, length = trainer.parallelism.tensor_parallel_degree, work.prompt_tokens + work.completion_tokens
    operations = forward_flops(shape, length) * (_passes(trainer) * role.trained_tokens + role.scored_tokens) / tp
    compute = operations / (_peak(trainer.training.mixed_precision_param, hardware) * REACHED["compute"])
    calls: dict[str, float] = {}
    turns: dict[str, float] = {}
    for name in links.within | links.between:
        link, seconds = link_seconds(links, name, hardware)
        kind, parts = ("tensor parallel", turns) if name == "tensor parallel" else ("FSDP", calls)
        parts[f"network of {kind}, {link}"] = parts.get(f"network of {kind}, {link}", 0.0) + seconds
    if sum(calls.values()) > compute:
        return turns | calls, {"compute": compute}
    return turns | {"compute": compute}, calls


def _generate(config: RunConfig, work: BatchWork, hardware: Hardware) -> dict[str, float]:
    """Seconds of the replica with most completions. All prompts are computed, then all sequences that the cache holds
    decode in step; the rest waits for the next round."""
    generator, shape = config.generator, resolve_shape(config.model)
    tp, memory = generator.tensor_parallel_degree, generator_parts(generator, shape)
    sequences = -(-work.num_completions // generator.num_replicas)
    itemsize = 2 if generator.dtype == "bfloat16" else 4
    per_token, states = kv_bytes_per_token(generator, shape), state_bytes(generator, shape)
    length = work.prompt_tokens + work.completion_tokens
    together = max(1, min(sequences, generator.max_num_seqs, memory["kv_cache"] // (per_token * length + states)))
    iterations = -(-sequences // together) * work.completion_tokens
    cached = per_token * (work.prompt_tokens + work.completion_tokens / 2) + 2 * states  # states are written, too
    cache = sequences * work.completion_tokens * cached
    read = (iterations * memory["weights"] + cache) / (hardware.hbm_gb_s * _GIGA * REACHED["memory"])
    speed = _peak(generator.dtype, hardware) * REACHED["compute"] * tp
    token = forward_flops(shape, length)
    decode = sequences * work.completion_tokens * token / speed
    reduced = 2 * shape.n_layers * shape.dim * itemsize * sequences * length * 2 * (tp - 1) / tp
    parts = {
        "generators: compute of prompts": sequences * work.prompt_tokens * token / speed,
        "generators: network of tensor parallel": reduced / (hardware.within_gb_s * _GIGA * REACHED["network"]),
    }
    if read > decode:
        parts["generators: memory bandwidth of decoding"] = read
    else:
        parts["generators: compute of decoding"] = decode
    return {name: seconds for name, seconds in parts.items() if seconds}


def _peak(dtype: str, hardware: Hardware) -> float:
    return (hardware.bfloat16_tflops if dtype == "bfloat16" else hardware.float32_tflops) * _TERA
