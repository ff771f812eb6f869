"""What `train` would refuse a config for on hosts that do not exist yet, and what it would still need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.inventory import Host, check_fits
from torchtitan_rl.train.evaluation import look_at_data
from torchtitan_rl.validation.rewards import check_reward
from torchtitan_rl.validation.run import missing_weights, validate

__all__ = ["config_refusal", "layout_refusal", "task_refusal"]


def config_refusal(config: RunConfig) -> str:
    """The first mistake of a config that shows before a process starts; "" for none."""
    return _refusal(lambda: validate(config))


def layout_refusal(config: RunConfig, hosts: list[Host]) -> str:
    """Why a settled config has no place on these hosts; "" when it has one."""
    return _refusal(lambda: check_fits(config, hosts))


def task_refusal(config: RunConfig) -> tuple[str, list[str]]:
    """(why the tasks or the reward cannot be used, "" when they can; what a run still needs, such as weights that are
    not on this machine). Calls the reward on two made-up completions."""
    needed = [missing_weights(config)]

    def check() -> None:
        family, unread = look_at_data(config)
        needed.append(unread)
        if not unread:
            asyncio.run(check_reward(config, family))

    return _refusal(check), [f"still needed: {what}" for what in needed if what]


def _refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""
