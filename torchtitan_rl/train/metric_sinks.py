"""Where a run's metrics go beside `metrics.jsonl`, each place behind a thread of its own."""

from __future__ import annotations

from functools import partial

from torchtitan_rl.config.resolve import function_name, resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.record import attempts
from torchtitan_rl.record.background import BackgroundListener
from torchtitan_rl.record.recorder import Listener, Metrics
from torchtitan_rl.record.run_dir import RunDir

__all__ = ["sinks_of"]


def sinks_of(config: RunConfig, run_dir: RunDir) -> list[Listener]:
    """A listener for each sink of `config.record`. Each is made in its own thread, so a sink that cannot start is
    reported, and the run starts without it."""
    record, sinks = config.record, list[Listener]()
    if record.tensorboard:
        from torchtitan_rl.record.sinks.tensorboard import TensorBoard

        attempt = attempts.attempts(run_dir)[-1]
        board = partial(TensorBoard, run_dir.path, resolved(config), attempt)
        sinks.append(BackgroundListener(board, "record.tensorboard", events=(Metrics,)))
    if record.wandb is not None:
        from torchtitan_rl.record.sinks.wandb import Wandb

        settings = {name: getattr(record.wandb, name) for name in ("project", "entity", "group", "mode")}
        logged = partial(Wandb, run_dir.path, resolved(config), run_dir.attempt, **settings)
        sinks.append(BackgroundListener(logged, "record.wandb", events=(Metrics,)))
    for sink in record.sinks:
        sinks.append(_own(sink))
    return sinks


def _own(sink) -> BackgroundListener:
    from torchtitan_rl.record.sinks.fact_listener import FactListener
    from torchtitan_rl.record.sinks.function import FunctionSink

    name, callable_sink = f"record.sinks: {function_name(sink)}", sink.func if isinstance(sink, partial) else sink
    if isinstance(callable_sink, type) and issubclass(callable_sink, Listener):
        own = partial(FactListener, sink) if hasattr(callable_sink, "fact") else sink
        return BackgroundListener(own, name, room=1000)  # it may keep tokens, too
    return BackgroundListener(FunctionSink(sink), name, events=(Metrics,))
