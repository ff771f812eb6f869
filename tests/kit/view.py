"""What `training_spec` reads of a trainer's config, for a model that is built without one."""

from types import SimpleNamespace

from torchtitan.config import ParallelismConfig

VIEW = SimpleNamespace(parallelism=ParallelismConfig(spmd_backend="partial_dtensor"))
