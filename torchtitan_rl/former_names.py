"""Modules that have moved, importable under their former names for one version, with a warning that names the new one.

Config files, notebooks and tasks of users name these modules. A finder of Python's import system answers for the former
names; nothing in this package imports them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["FORMER_NAMES", "install"]

FORMER_NAMES = {
    "actors.config": "config.meshes",
    "algorithm.config": "config.algorithm",
    "config.actors": "config.meshes",
    "config.constraints": "constraints",
    "config.recording": "config.record",
    "hosts.attach": "launch.attach",
    "hosts.inventory": "launch.inventory",
    "hosts.jobs": "launch.jobs",
    "hosts.torchrun": "launch.torchrun",
    "hosts.worker": "launch.worker",
    "inspection.run": "health.run_reader",
    "memory": "model.memory",
    "model.config": "config.model",
    "observability.attempts": "record.attempts",
    "observability.plot": "record.plot",
    "observability.progress": "record.console.progress",
    "observability.recorder": "record.recorder",
    "observability.run_dir": "record.run_dir",
    "observability.tables": "record.tables",
    "record.progress": "record.console.progress",
    "run.controller": "train.controller",
    "run.draws": "rollout.draws",
    "run.evaluation": "train.evaluation",
    "server.gateway": "serve.gateway",
    "types.sampling": "types.completions",
    "workflows.agent": "rollout.agent",
    "workflows.chat": "rollout.chat",
    "workflows.external": "rollout.external",
    "workflows.group": "rollout.group",
    "workflows.multi_turn": "rollout.multi_turn",
    "workflows.policy": "rollout.policy",
    "workflows.sampler": "rollout.sampler",
    "workflows.self_distill": "rollout.self_distill",
}
"""Former name -> present name, both below `torchtitan_rl`."""

_ROOT = "torchtitan_rl."
_FORMER_ROOMS = {"hosts", "inspection", "observability", "run", "server", "workflows"}
"""Packages that hold nothing any more, but whose names are part of former names."""


def install() -> None:
    """Makes the former names importable. A second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder):
    """Answers for former names, after every other finder."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        name = fullname.removeprefix(_ROOT)
        if name == fullname:
            return None
        if name in _FORMER_ROOMS:
            return ModuleSpec(fullname, _EmptyPackage(), is_package=True)
        return ModuleSpec(fullname, _Alias(FORMER_NAMES[name])) if name in FORMER_NAMES else None


class _EmptyPackage(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        """None: the import system makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        """An empty package has nothing to run."""


class _Alias(Loader):
    """Loads a former name as the module that has its present name: one module, whichever name imports it."""

    def __init__(self, present: str) -> None:
        self._present = _ROOT + present

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name}: has moved; import {self._present}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self._present)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the former name's
