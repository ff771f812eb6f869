"""The gateway of a run: opened for a workflow whose agents need one, or to serve the policy meanwhile.

`serve.gateway` imports FastAPI; most runs open no gateway, so this module imports that one where it opens a gateway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.record.console.notices import say
from torchtitan_rl.rollout.ignored_parameters import check_ignored
from torchtitan_rl.rollout.policy import Policy

if TYPE_CHECKING:
    from torchtitan_rl.rollout.external import External
    from torchtitan_rl.serve.gateway import Gateway, Served

__all__ = ["Address", "announce", "context_of", "external_of", "open_gateway", "policy_of", "serving"]


def external_of(workflow: Callable | None) -> External | None:
    """The `External` that a workflow is or wraps, by `functools.wraps`, `functools.partial` or a field `workflow`."""
    layer: Any = workflow
    while layer is not None and not hasattr(layer, "attach"):
        inner = layer.func if isinstance(layer, partial) else getattr(layer, "__wrapped__", None)
        layer = getattr(layer, "workflow", None) if inner is None else inner
    return layer


def context_of(config: RunConfig) -> int:
    """The most tokens of a prompt with its completion in a rollout of an agent: what the limits on rollouts, generators
    and trainer allow. `config` is settled."""
    allowed = min(config.generator.max_model_len, config.trainer.training.seq_len)
    return min(allowed, config.sampling.max_rollout_tokens or allowed)


async def open_gateway(config: RunConfig) -> Gateway | None:
    """The gateway that the config's workflow asks for, open and attached; None: no agent plays."""
    if (external := external_of(config.algorithm.workflow)) is None:
        return None
    from torchtitan_rl.serve.gateway import Gateway

    vocab_size = resolve_shape(config.model).vocab_size
    gateway = await Gateway(context_tokens=context_of(config), vocab_size=vocab_size).__aenter__()
    external.attach(gateway)
    return gateway


@dataclass(kw_only=True, slots=True)
class Address:
    """Where clients come in, and how their calls of tools are read."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str = ""
    """A file with the key; empty: the variable TORCHTITAN_RL_API_KEY, or none on a loopback address."""
    tool_parser: str = ""
    """vLLM's parser of tool calls; empty: the policy's text is not read for calls."""
    allow_hosts: Collection[str] = ()
    """Names in `Host` headers besides this machine's loopback's, where no key is asked for."""
    ignored: tuple[str, ...] = ()
    """Parameters that requests are answered without; see `rollout.ignored_parameters.IGNORABLE`."""

    def check(self, host_flag: str = "--host") -> None:
        """Raises ValueError for a port on which nothing could listen now, for a key that is missing, and for a
        parameter that cannot be ignored. `host_flag`: how the command calls `host`."""
        from torchtitan_rl.serve.keys import read_key
        from torchtitan_rl.serve.listening import require_free

        check_ignored(self.ignored, "--ignore")
        read_key(self.api_key_file, self.host, host_flag=host_flag)
        require_free(self.host, self.port)

    def gateway(self, served: Served, *, context_tokens: int, vocab_size: int) -> Gateway:
        """The gateway, not yet open. Raises ValueError for a key that is missing, for a tool parser that is none or
        does not go with the chat template, and for a parameter that cannot be ignored."""
        from torchtitan_rl.serve.gateway import Gateway
        from torchtitan_rl.serve.keys import read_key

        check_ignored(self.ignored, "--ignore")
        served.tool_parser, served.ignored = self.tool_parser, tuple(self.ignored)
        gateway = Gateway(
            context_tokens=context_tokens,
            vocab_size=vocab_size,
            host=self.host,
            port=self.port,
            api_key=read_key(self.api_key_file, self.host),
            served=served,
            allow_hosts=self.allow_hosts,
        )
        reader = gateway.sessions.tool_reader(self.tool_parser, served.policy.tokenizer)  # refuses a wrong name now
        if reader is not None:
            reader.check_template()  # clients without a session send calls back, which the template has to show
        return gateway


@asynccontextmanager
async def serving(controller: Any, address: Address | None, *, quiet: bool) -> AsyncIterator[Gateway | None]:
    """Serves the run of a `Controller` for as long as the block runs: its newest version as `policy`, each version that
    is published as `policy@VERSION`, and where adapters are side by side their base as `base`. None: serves nothing."""
    if address is None:
        yield None
        return
    from torchtitan_rl.serve.gateway import Served

    config, versions = controller.config, controller.versions
    context = context_of(config)
    served = Served(
        name="policy",
        policy=policy_of(controller.generator, controller.tokenizer, context),
        versions=lambda: [] if versions is None else list(versions.holders()),
        no_base=_no_base(config),
    )
    vocab_size = resolve_shape(config.model).vocab_size
    async with address.gateway(served, context_tokens=context, vocab_size=vocab_size) as gateway:
        announce(gateway, f"the run's newest version, {'' if served.no_base else 'base, '}and policy@VERSION", quiet)
        yield gateway


def _no_base(config: RunConfig) -> str:
    """Why generators of a run cannot sample from the base of its adapters, and what to do; empty: they can."""
    if config.generator.max_adapters:
        return ""
    if config.trainer.lora is None:
        return "this run trains all weights, and none of a base are there; use policy, or serve where it began"
    return (
        "adapters are merged into the weights that generators have (generator.max_adapters=0); use policy, or start a "
        "run with generator.max_adapters of 2 or more"
    )


def policy_of(client: Any, tokenizer: Any, context: int) -> Policy:
    """The policy as clients without a session meet it: no limit but the context, temperature 1 unless they say."""
    return Policy(generator=client, tokenizer=tokenizer, max_tokens=context, max_prompt_tokens=context)


def announce(gateway: Gateway, description: str, quiet: bool) -> None:
    """Says on the console where the policy is served, unless `quiet`."""
    if not quiet:
        say(f"serving {gateway.url}/v1 (model=policy): {description}", event="serving")
