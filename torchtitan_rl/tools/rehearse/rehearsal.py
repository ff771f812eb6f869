"""A run on hosts that do not exist yet: who sits where, what devices hold, what links carry, what limits a step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.inventory import Host, Place, check_fits, meshes, places
from torchtitan_rl.launch.preflight import memory_problem
from torchtitan_rl.model.memory import generator_parts, gpu_bytes, trainer_parts, working_parts
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.tools.rehearse.capacity import Times, batch_times
from torchtitan_rl.tools.rehearse.hardware import REACHED, Hardware
from torchtitan_rl.tools.rehearse.links import Links, links_of
from torchtitan_rl.tools.rehearse.process_placement import Seat, host_of_ranks, seats
from torchtitan_rl.tools.rehearse.shards import MeshShards, mesh_shards
from torchtitan_rl.tools.rehearse.sync import SYNC, sync_links
from torchtitan_rl.tools.rehearse.trace_file import Collective, trace_microbatch
from torchtitan_rl.tools.rehearse.work import BatchWork, RoleWork, batch_work
from torchtitan_rl.train.evaluation import look_at_data
from torchtitan_rl.validation.rewards import check_reward
from torchtitan_rl.validation.run import advice, missing_weights, validate

__all__ = ["Load", "Rehearsal", "rehearse", "TRAINS"]

TRAINS = ("policy", "critic")


@dataclass(kw_only=True, slots=True)
class Load:
    """GPUs that carry ranks of the same meshes."""

    meshes: list[str]
    num_gpus: int
    needed: int
    """Bytes, with the allowances of `memory.gpu_bytes`, of the rank with the largest shards."""
    has: int


@dataclass(kw_only=True, slots=True)
class Rehearsal:
    """What is known before a cluster is touched. After a refusal of the config or its layout nothing else is filled in;
    after one of memory, everything is."""

    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    shards: dict[str, MeshShards] = field(default_factory=dict)
    """By trainer role."""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes by role and part, of one rank; of a trainer's, the rank with the largest shards."""
    loads: list[Load] = field(default_factory=list)
    work: BatchWork | None = None
    links: dict[str, Links] = field(default_factory=dict)
    """What a batch sends, by trainer role, and under `weight sync`."""
    taken: dict[int, int] = field(default_factory=dict)
    """Bytes of a publication that each host with generators takes in from other hosts."""
    unknown: list[str] = field(default_factory=list)
    """What could not be rehearsed, and why."""
    times: Times | None = None
    """None without GPUs: no rates are stated for CPUs."""


def rehearse(
    config: RunConfig, hosts: list[Host], hardware: Hardware, *, completion_tokens: int = 0, check_task: bool = True
) -> Rehearsal:
    """Rehearses one batch. Starts nothing and needs no memory for the model. `completion_tokens`: see `batch_work`.
    `check_task=False`: neither data nor reward are looked at."""
    rehearsal = Rehearsal()
    if problem := _config_refusal(config):
        rehearsal.refused.append(problem)
        return rehearsal
    rehearsal.warnings = advice(config)
    config = settled(config)
    if check_task:
        problem, needed = _task_refusal(config)
        rehearsal.refused += filter(None, [problem])
        rehearsal.warnings += needed
    if problem := _layout_refusal(config, hosts):
        rehearsal.refused.append(problem)
        return rehearsal
    placed = places(config, hosts)
    rehearsal.seats = seats(meshes(config), placed, len(hosts))
    device = "cuda" if hosts[0].devices else "cpu"
    _rehearse_memory(rehearsal, config, hosts, placed, device)
    rehearsal.work = batch_work(config, completion_tokens, device=device)
    _rehearse_traffic(rehearsal, config, placed, device)
    if device == "cuda" and not rehearsal.unknown:
        sync = max([0, *rehearsal.links[SYNC].between.values(), *rehearsal.taken.values()])
        seconds = sync / (hardware.between_gb_s * 1e9 * REACHED["network"])
        rehearsal.times = batch_times(config, rehearsal.work, rehearsal.links, seconds, hardware)
    return rehearsal


def _rehearse_memory(
    rehearsal: Rehearsal, config: RunConfig, hosts: list[Host], placed: dict[str, Place], device: str
) -> None:
    parts: dict[str, dict[str, int]] = {}
    for role, (trainer, model) in config.trainers().items():
        shape, trains = resolve_shape(model), role in TRAINS
        shards = rehearsal.shards[role] = mesh_shards(trainer, model, role, device)
        most = shards.largest
        measured = {"parameters": most.parameters, "gradients": most.gradients, "optimizer": most.optimizer}
        parts[role] = trainer_parts(trainer, shape, trains=trains, device=device) | measured
        working = working_parts(trainer, shape, trains=trains, device=device)
        rehearsal.memory[role] = measured | working | {"step": parts[role]["step"]}
    rehearsal.memory["generator"] = parts["generator"] = generator_parts(config.generator, resolve_shape(config.model))
    if problem := memory_problem(config, hosts, parts=parts):
        rehearsal.refused.append(problem)
    loads: Counter[tuple[str, ...]] = Counter()
    on: dict[tuple[int, str], list[str]] = {}
    for role, place in placed.items():
        for host, devices in zip(place.hosts, place.devices, strict=True):
            for name in filter(None, devices.split(",")):
                on.setdefault((host, name), []).append(role)
    for roles in on.values():
        loads[tuple("generator-0" if role.startswith("generator-") else role for role in roles)] += 1
    sizes = [gpu.total_bytes for host in hosts if host.cuda is not None for gpu in host.cuda.gpus]
    for together, number in loads.items():
        needed = gpu_bytes(config, together, parts)
        rehearsal.loads.append(Load(meshes=list(together), num_gpus=number, needed=needed, has=min(sizes)))


def _rehearse_traffic(rehearsal: Rehearsal, config: RunConfig, placed: dict[str, Place], device: str) -> None:
    assert rehearsal.work is not None
    sizes = {mesh.role: mesh for mesh in meshes(config)}
    hosts_of_role = {role: host_of_ranks(sizes[role], placed[role]) for role in config.trainers()}
    for role, (trainer, model) in config.trainers().items():
        if resolve_shape(model).experts is not None:
            rehearsal.unknown.append(
                f"{role}: what a mixture of experts sends depends on where its router sends tokens"
            )
            continue
        calls = _batch_calls(config, role, rehearsal.work.roles[role], device)
        rehearsal.links[role] = links_of(calls, trainer, hosts_of_role[role])
    generator_hosts = [host for name, place in placed.items() if sizes[name].replica for host in place.hosts]
    rehearsal.links[SYNC], rehearsal.taken = sync_links(
        rehearsal.shards["policy"], config.trainer, config.generator.dtype, hosts_of_role["policy"], generator_hosts
    )


def _batch_calls(config: RunConfig, role: str, work: RoleWork, device: str) -> Counter[Collective]:
    """The collective calls of a batch of one role's rank. Microbatches are traced at their mean number of tokens; bytes
    are a constant plus a multiple of the tokens, so the sum is that of the real ones."""
    trainer, model = config.trainers()[role]
    calls: Counter[Collective] = Counter()
    for number, tokens, trains in ((work.trained, work.trained_tokens, True), (work.scored, work.scored_tokens, False)):
        if number:
            traced = trace_microbatch(trainer, model, role, -(-tokens // number), device=device, trains=trains)
            for collective, times in (traced.forward + traced.backward).items():
                calls[collective] += times * number
    return calls


def _config_refusal(config: RunConfig) -> str:
    """The first mistake of a config that shows before a process starts; "" for none."""
    return _refusal(lambda: validate(config))


def _layout_refusal(config: RunConfig, hosts: list[Host]) -> str:
    """Why a settled config has no place on these hosts; "" when it has one."""
    return _refusal(lambda: check_fits(config, hosts))


def _task_refusal(config: RunConfig) -> tuple[str, list[str]]:
    """(why the tasks or the reward cannot be used, "" when they can; what a run still needs, such as weights that are
    not on this machine). Calls the reward on two made-up completions."""
    needed = [missing_weights(config)]

    def check() -> None:
        family, unread = look_at_data(config)
        needed.append(unread)
        if not unread:
            asyncio.run(check_reward(config, family))

    return _refusal(check), [f"still needed: {problem}" for problem in needed if problem]


def _refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""
