"""`torchtitan-rl rehearse CONFIG --hosts N --gpus-per-host M`: what a run would do to a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys

from torchtitan_rl import platform
from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.tools.rehearse.hardware import GPUS, Hardware
from torchtitan_rl.tools.rehearse.process_placement import imagined_hosts
from torchtitan_rl.tools.rehearse.rehearsal import rehearse
from torchtitan_rl.tools.rehearse.report import as_json, print_report

__all__ = ["add_arguments", "run"]

_RATES = ("memory_gib", "bfloat16_tflops", "float32_tflops", "hbm_gb_s", "within_gb_s", "between_gb_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a Python file with a config() function; its fields are set as for train")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="equal hosts; default: 1")
    parser.add_argument("--gpus-per-host", type=int, default=8, metavar="M", help="0: CPU hosts; default: 8")
    parser.add_argument(
        "--cores-per-host", type=int, default=0, metavar="N", help="default: 8 per GPU; of CPU hosts, this machine's"
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="the GPU's figures; default: h100")
    for name in _RATES:
        flag = "gpu-memory-gib" if name == "memory_gib" else name.replace("_", "-")
        parser.add_argument(f"--{flag}", dest=name, type=float, metavar="X", help="in place of the GPU's")
    parser.add_argument(
        "--completion-tokens", type=int, default=0, metavar="N", help="mean length; default: sampling.max_tokens"
    )
    parser.add_argument("--no-reward-check", action="store_true", help="do not look at data and reward")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Returns 1 for a config that would be refused, else 0."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # as in every rank's logs
    config = load_config(args.config)
    apply_overrides(config, args.overrides, args.options["rehearse"])
    rates = {name: getattr(args, name) for name in _RATES if getattr(args, name) is not None}
    hardware = dataclasses.replace(GPUS[args.gpu], **rates)
    _check(hardware, args.completion_tokens, config.sampling.max_tokens)
    cores = args.cores_per_host or (8 * args.gpus_per_host if args.gpus_per_host else platform.num_cores())
    hosts = imagined_hosts(args.hosts, args.gpus_per_host, cores, hardware.name, hardware.memory_gib)
    rehearsal = rehearse(
        config, hosts, hardware, completion_tokens=args.completion_tokens, check_task=not args.no_reward_check
    )
    if args.json:
        json.dump(as_json(rehearsal), sys.stdout, indent=1)
        print()
    else:
        print_report(rehearsal, hardware)
    return 1 if rehearsal.refused else 0


def _check(hardware: Hardware, completion_tokens: int, most: int) -> None:
    for name in _RATES:
        if not 0 < (value := getattr(hardware, name)) < float("inf"):
            flag = "gpu-memory-gib" if name == "memory_gib" else name.replace("_", "-")
            raise ValueError(f"--{flag}={value:g}: must be positive")
    if not 0 <= completion_tokens <= most:
        raise ValueError(
            f"--completion-tokens={completion_tokens}: must be from 0 (the longest) to sampling.max_tokens={most}"
        )
