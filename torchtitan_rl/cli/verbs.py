"""The verbs of `torchtitan-rl`. Each has a module with `add_arguments(parser)` and `run(args)`, which returns the exit
status. The module is imported when its verb is used: a verb that looks at a run does not wait for those that train.

`args` has what `add_arguments` defines, and `verb`, `argv` (the words of the command), `options` (verb -> its options),
`overrides` (words that are fields of a config), `debug` and `quiet`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

__all__ = ["VERBS", "Verb"]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb's help, the import of its module, and an example for the end of its help."""

    text: str
    load: Callable[[], ModuleType] | None
    """None: `cli.main` itself answers."""
    example: str
    overrides: bool = False
    """Whether the verb takes a config file and fields of the config, as `args.overrides`."""
    quiet: bool = False
    """Whether the verb takes `--quiet`."""


def _train() -> ModuleType:
    from torchtitan_rl.cli import train

    return train


def _fork() -> ModuleType:
    from torchtitan_rl.cli import fork_verb

    return fork_verb


def _sweep() -> ModuleType:
    from torchtitan_rl.cli import sweep_verb

    return sweep_verb


def _eval() -> ModuleType:
    from torchtitan_rl.cli import evaluate

    return evaluate


def _sample() -> ModuleType:
    from torchtitan_rl.cli import sample

    return sample


def _serve() -> ModuleType:
    from torchtitan_rl.cli import serve

    return serve


def _serve_tinker() -> ModuleType:
    from torchtitan_rl.cli import serve_tinker

    return serve_tinker


def _audit() -> ModuleType:
    from torchtitan_rl.tools import audit

    return audit


def _scale() -> ModuleType:
    from torchtitan_rl.cli import scale

    return scale


def _replay() -> ModuleType:
    from torchtitan_rl.cli import replay

    return replay


def _verify() -> ModuleType:
    from torchtitan_rl.tools import verify

    return verify


def _export() -> ModuleType:
    from torchtitan_rl.cli import export

    return export


def _show() -> ModuleType:
    from torchtitan_rl.cli import show

    return show


def _certify() -> ModuleType:
    from torchtitan_rl.cli import certify

    return certify


def _doctor() -> ModuleType:
    from torchtitan_rl.cli import doctor

    return doctor


def _view() -> ModuleType:
    from torchtitan_rl.tools.view import view_verb

    return view_verb


def _diagnose() -> ModuleType:
    from torchtitan_rl.tools import diagnose

    return diagnose


def _plot() -> ModuleType:
    from torchtitan_rl.tools import plots

    return plots


def _compare() -> ModuleType:
    from torchtitan_rl.tools import comparison

    return comparison


def _timeline() -> ModuleType:
    from torchtitan_rl.tools.timeline import timeline_verb

    return timeline_verb


def _rehearse() -> ModuleType:
    from torchtitan_rl.tools.rehearse import rehearse_verb

    return rehearse_verb


def _bench() -> ModuleType:
    from torchtitan_rl.tools.bench import bench_verb

    return bench_verb


def _keys() -> ModuleType:
    from torchtitan_rl.serve.tinker import owners

    return owners


def _explain_mismatch() -> ModuleType:
    from torchtitan_rl.tools import explain_mismatch

    return explain_mismatch


VERBS = {
    "quickstart": Verb(
        "train the tiny model of the config that comes with the package; options as for train",
        None,
        "torchtitan-rl quickstart --output-dir runs/first",
        overrides=True,
        quiet=True,
    ),
    "train": Verb(
        "run a config: warm start, reinforcement, evaluation, checkpoint",
        _train,
        "torchtitan-rl train configs/quickstart.py --output-dir runs/first --controller.num-steps 20",
        overrides=True,
        quiet=True,
    ),
    "fork": Verb(
        "go on from a run's checkpoint with other settings, in a new run with the same draws and noise",
        _fork,
        "torchtitan-rl fork runs/first --at 80 --set algorithm.loss_config.clip_high=0.3 --name wider-clip",
        quiet=True,
    ),
    "sweep": Verb(
        "compare values of fields over seeds, as forks that share warm start, draws and noise",
        _sweep,
        "torchtitan-rl sweep configs/quickstart.py --set trainer.optimizer.lr=1e-3,5e-4 --seeds 0..4",
        overrides=True,
    ),
    "eval": Verb(
        "accuracy of a checkpoint on a split",
        _eval,
        "torchtitan-rl eval configs/quickstart.py --checkpoint runs/first/checkpoints/step-160 --split test",
        overrides=True,
        quiet=True,
    ),
    "sample": Verb(
        "complete a prompt with a checkpoint",
        _sample,
        "torchtitan-rl sample --checkpoint runs/first/checkpoints/step-160 --prompt 'dcab='",
        quiet=True,
    ),
    "serve": Verb(
        "open OpenAI's endpoints on a checkpoint",
        _serve,
        "torchtitan-rl serve runs/first/checkpoints/step-160 --port 8000",
        quiet=True,
    ),
    "serve-tinker": Verb(
        "serve a config's model to Tinker's SDK: train, sample, save",
        _serve_tinker,
        "torchtitan-rl serve-tinker configs/quickstart.py --port 8000",
        overrides=True,
        quiet=True,
    ),
    "audit": Verb(
        "check that a run's records agree: every draw ended once", _audit, "torchtitan-rl audit runs/first", quiet=True
    ),
    "scale": Verb(
        "give a run that goes on another number of generator replicas, or other hosts",
        _scale,
        "torchtitan-rl scale runs/first --replicas 3",
    ),
    "replay": Verb(
        "take the steps of a recorded run again: the same tokens, gradients, weights",
        _replay,
        "torchtitan-rl replay runs/first --to 20 --verify --backend local",
        quiet=True,
    ),
    "verify": Verb(
        "check that a run's files are as they were written, and whether two runs are the same run",
        _verify,
        "torchtitan-rl verify runs/first runs/second",
    ),
    "export": Verb(
        "write a checkpoint's policy as a Hugging Face directory",
        _export,
        "torchtitan-rl export runs/first/checkpoints/step-160 runs/first-hf",
        quiet=True,
    ),
    "show": Verb(
        "print a resolved config and the memory each process will need",
        _show,
        "torchtitan-rl show configs/quickstart.py --algorithm.group-size 16",
        overrides=True,
        quiet=True,
    ),
    "certify": Verb(
        "compare trainer, engine and layouts of a model with transformers, number by number",
        _certify,
        "torchtitan-rl certify models/Qwen3-0.6B",
        quiet=True,
    ),
    "doctor": Verb("print versions, devices and what is missing", _doctor, "torchtitan-rl doctor", quiet=True),
    "completion": Verb(
        "print what a shell reads to complete verbs, options, config files and fields",
        None,
        "torchtitan-rl completion bash > ~/.local/share/bash-completion/completions/torchtitan-rl",
        quiet=True,
    ),
    "view": Verb("a web page over runs: health, curves, evaluations, rollouts", _view, "torchtitan-rl view runs/first"),
    "diagnose": Verb(
        "what is wrong with a run, finished or going on, and what to do", _diagnose, "torchtitan-rl diagnose runs/first"
    ),
    "plot": Verb(
        "draw curves of several runs in one picture", _plot, "torchtitan-rl plot runs/first runs/second -o curves.png"
    ),
    "compare": Verb(
        "what differs between runs, beside the spread over seeds",
        _compare,
        "torchtitan-rl compare runs/first runs/second",
    ),
    "timeline": Verb("where the time of a run's steps went", _timeline, "torchtitan-rl timeline runs/first"),
    "rehearse": Verb(
        "who would sit where on a cluster, memory, traffic, what limits a step, what is refused",
        _rehearse,
        "torchtitan-rl rehearse configs/quickstart.py --hosts 4 --gpus-per-host 8",
        overrides=True,
    ),
    "bench": Verb(
        "how fast this machine generates, trains, syncs and starts, beside the fastest that it can by other means",
        _bench,
        "torchtitan-rl bench generate train --size 3m --dtypes float32",
        quiet=True,
    ),
    "keys": Verb(
        "add, remove and list owners in a file of keys for serve-tinker", _keys, "torchtitan-rl keys add keys.txt alice"
    ),
    "explain-mismatch": Verb(
        "why trainer and generators disagree about sampled tokens",
        _explain_mismatch,
        "torchtitan-rl explain-mismatch runs/first",
    ),
}
