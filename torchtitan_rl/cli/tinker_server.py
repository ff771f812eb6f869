"""Serving a model for Tinker's SDK: its trainer and its generators behind HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.role_mesh import WorkerLost
from torchtitan_rl.environment import let_garbage_wait
from torchtitan_rl.launch.backend import Launcher, Stack
from torchtitan_rl.launch.choice import ActorBackend
from torchtitan_rl.launch.liveness.watchdog import alive
from torchtitan_rl.model.decoding import holds_adapters
from torchtitan_rl.model.files import assets_dir, has_weights, load_tokenizer, pad_token_id, write_model_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.serve.guard import allowed_hosts
from torchtitan_rl.serve.keys import is_loopback, read_key
from torchtitan_rl.serve.listening import Listening, require_free
from torchtitan_rl.serve.tinker.app import guarded, make_app
from torchtitan_rl.serve.tinker.downloads import write_hf_form
from torchtitan_rl.serve.tinker.owners import KeyFile, Keys, OneKey
from torchtitan_rl.serve.tinker.service import ServedModel, Server, TinkerLimits
from torchtitan_rl.train.start import dated
from torchtitan_rl.validation.run import missing_weights

__all__ = ["TinkerOptions", "adapted", "keys_of", "open_server", "serve_tinker"]

_GRACE_S = 5.0
"""Seconds for which a server that has lost its trainer still says so."""
_RESTARTS = 3


@dataclass(kw_only=True, slots=True)
class TinkerOptions:
    """What the verb adds to a config."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str = ""
    """One key for everybody; empty: `TORCHTITAN_RL_API_KEY`, or none."""
    keys: str = ""
    """A file of keys with owners, each of whom sees what is theirs alone."""
    shared: bool = False
    """Everybody who may come in sees everything, also from other machines."""
    base_model: str = ""
    """The model's name for clients, who also load the tokenizer by it; empty: the path of `model.assets`."""
    lora_rank: int = 32
    """The largest rank of adapters where the config has no `trainer.lora`; 0: one model trains all parameters."""
    max_models: int = 8
    merged: bool = False
    """Generators hold one version at a time, with its adapters merged in."""
    allow_host: list[str] = field(default_factory=list)
    """Names in `Host` headers besides this machine's loopback's, where no key is asked for."""


def adapted(config: RunConfig, options: TinkerOptions) -> RunConfig:
    """The config of a server: with adapters, which generators hold side by side where they can, and with generators
    that are replaced when they are lost. Raises ValueError for roles beside the policy."""
    if other_roles := [name for name in config.trainers() if name != "policy"]:
        raise ValueError(f"roles.{other_roles[0]}: a server trains the policy alone; leave roles.{other_roles[0]} out")
    if options.max_models < 1:
        raise ValueError(f"--max-models={options.max_models}: must be at least 1")
    trainer, generator = config.trainer, config.generator
    if trainer.lora is None and options.lora_rank:
        # alpha / rank = 1 for the largest rank; smaller ranks learn at about the same rate with the same alpha.
        lora = LoRAConfig(rank=options.lora_rank, alpha=32.0)
        trainer = dataclasses.replace(trainer, lora=lora)
    if trainer.lora is not None and not generator.max_adapters and not options.merged and holds_adapters(generator):
        generator = dataclasses.replace(generator, max_adapters=options.max_models + 1)  # each model's, and the base
    if not generator.max_replica_restarts:
        generator = dataclasses.replace(generator, max_replica_restarts=_RESTARTS)
    return dataclasses.replace(config, trainer=trainer, generator=generator)


def keys_of(options: TinkerOptions) -> Keys:
    """Who may come in, and who sees what. Without a file of keys everybody sees everything: as it is where only this
    machine reaches the server, elsewhere with `shared` alone.

    Raises ValueError for keys that the SDK does not send, and for options that contradict each other."""
    if options.keys:
        if options.shared or options.api_key_file:
            other = "--shared" if options.shared else "--api-key-file"
            raise ValueError(
                f"--keys={options.keys}: each owner sees what is theirs alone, with {other} all see all; "
                "leave one of them out"
            )
        return KeyFile(Path(options.keys))
    key = read_key(options.api_key_file, options.host)
    if key and not key.startswith("tml-"):
        raise ValueError("API key: does not begin with 'tml-', as the SDK asks; choose one that does")
    if not options.shared and not is_loopback(options.host):
        raise ValueError(
            f"--host={options.host}: with one key everybody sees, uses and may delete everybody's models and "
            "checkpoints; give --keys FILE (torchtitan-rl keys add FILE OWNER makes it), or add --shared"
        )
    return OneKey(key)


async def open_server(config: RunConfig, options: TinkerOptions, run_dir: RunDir, launcher: Launcher) -> Server:
    """Starts the meshes, and the server over them. `config` is settled."""
    assets = assets_dir(config.model).absolute()
    tokenizer, shape = load_tokenizer(assets), resolve_shape(config.model)
    ends = {"eos": tokenizer.eos_token_id, "pad": pad_token_id(tokenizer)}
    model_dir = run_dir.path / "model"
    write_model_dir(model_dir, shape, assets, **ends)
    stack: Stack = await launcher.start(config, model_dir, eos=tokenizer.eos_token_id)
    trainer, base_dir = stack.roles["policy"], assets
    if config.trainer.lora is None and not has_weights(config.model):
        base_dir = run_dir.path.absolute() / "base"  # random weights: kept, for models that begin anew
        await trainer.save_hf_model(base_dir, **ends)
    served = ServedModel(
        base_model=options.base_model or _loadable(str(assets)),
        base_dir=base_dir,
        family=shape.name,
        vocab_size=shape.vocab_size,
        context_tokens=config.generator.max_model_len,
        trained_tokens=config.trainer.training.seq_len,
        lora=config.trainer.lora,
        adapters_apart=config.generator.max_adapters > 0,
        end_tokens=ends,
        write_form=partial(write_hf_form, model=config.model, model_dir=model_dir),
    )
    limits = TinkerLimits(max_models=options.max_models)
    assert stack.versions is not None
    server = Server(served, trainer, stack.versions, stack.generator, run_dir.path.absolute(), limits)
    await server.open()
    let_garbage_wait()  # clients wait during a collection
    return server


def _loadable(path: str) -> str:
    """A path that the SDK takes for no ORG/MODEL/VARIANT, which has two slashes."""
    return f"{path}/" if path.count("/") == 2 else path


async def serve_tinker(config: RunConfig, options: TinkerOptions, *, quiet: bool = False) -> None:
    """Serves until SIGINT or SIGTERM. Models, checkpoints and logs are in `config.output_dir`, where a server that was
    started again finds what was saved.

    Raises ValueError, before anything starts, for what cannot be served, and RuntimeError when the trainer is lost.
    """
    keys = keys_of(options)
    names = allowed_hosts(options.host, keys.needed, options.allow_host)
    require_free(options.host, options.port)
    if missing := missing_weights(config):
        raise ValueError(missing)
    run_dir = RunDir.create(config.output_dir or dated(f"tinker-{config.name}"))
    actors = ActorBackend()
    launcher = actors.launcher(config, actors.hosts_for(config, None, generators_only=False), str(run_dir.logs))
    try:
        server = await open_server(config, options, run_dir, launcher)
        ended, lost = _ends(server)
        listening = Listening(guarded(make_app(server, keys), names), options.host, options.port)
        async with listening:
            if not quiet:
                print(
                    f"serving TINKER_BASE_URL={listening.url} base_model={server.served.base_model}: "
                    f"{_models_text(config, options)}; {keys.description()}; models and logs in {run_dir.path}",
                    file=sys.stderr,
                    flush=True,
                )
            with alive(config.controller.hang_timeout_s):
                await ended.wait()
                if lost:
                    await asyncio.sleep(_GRACE_S)  # clients fetch the failures of their requests
        await server.close()
        if lost:
            raise RuntimeError(f"the server lost a worker ({lost[0]}); models that were not saved are gone")
    finally:
        launcher.kill()


def _models_text(config: RunConfig, options: TinkerOptions) -> str:
    lora = config.trainer.lora
    return "one model, all parameters" if lora is None else f"{options.max_models} models of LoRA rank <= {lora.rank}"


def _ends(server: Server) -> tuple[asyncio.Event, list[Exception]]:
    """An event that is set when the server has to end, and the worker's failure that made it."""
    loop, ended, lost = asyncio.get_running_loop(), asyncio.Event(), list[Exception]()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)

    def failed(error: Exception) -> None:
        if isinstance(error, WorkerLost):
            lost.append(error)
            ended.set()

    server.on_server_fault = failed
    return ended, lost
