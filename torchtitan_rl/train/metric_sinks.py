"""Where a run's metrics go beside `metrics.jsonl`, each place behind a thread of its own."""

from __future__ import annotations

from functools import partial

from torchtitan_rl.config.resolve import function_name, resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.record import attempts
from torchtitan_rl.record.aside import Aside
from torchtitan_rl.record.recorder import Listener
from torchtitan_rl.record.run_dir import RunDir

__all__ = ["sinks_of"]

_METRICS = ("metrics",)


def sinks_of(config: RunConfig, run_dir: RunDir) -> list[Listener]:
    """A listener for each sink of `config.record`. Each is made in its own thread, so a sink that cannot start is
    reported, and the run starts without it."""
    record, asides = config.record, list[Listener]()
    if record.tensorboard:
        from torchtitan_rl.record.sinks.tensorboard import TensorBoard

        attempt = attempts.attempts(run_dir)[-1]
        board = partial(TensorBoard, run_dir.path, resolved(config), attempt)
        asides.append(Aside(board, "record.tensorboard", hears=_METRICS))
    if record.wandb is not None:
        from torchtitan_rl.record.sinks.wandb import Wandb

        settings = {name: getattr(record.wandb, name) for name in ("project", "entity", "group", "mode")}
        logged = partial(Wandb, run_dir.path, resolved(config), run_dir.attempt, **settings)
        asides.append(Aside(logged, "record.wandb", hears=_METRICS))
    for sink in record.sinks:
        asides.append(_own(sink))
    return asides


def _own(sink) -> Aside:
    from torchtitan_rl.record.sinks.function import FunctionSink

    name, made = f"record.sinks: {function_name(sink)}", sink.func if isinstance(sink, partial) else sink
    if isinstance(made, type) and issubclass(made, Listener):
        return Aside(sink, name, room=1000)  # it may hear of tokens, too
    return Aside(FunctionSink(sink), name, hears=_METRICS)
