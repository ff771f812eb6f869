"""What recording costs: CPU seconds and wall time of the quickstart against a run that records nothing.

    .venv/bin/python -m benchmarks.recording_cost [--pairs 20] [--steps 20] [--supervised-steps 20] [--whole]
                                                 [--defaults] [--only record.schedule]

Everything that can be recorded; with `--defaults` what a run records unless told otherwise. Runs in pairs, both at the
same time, as benchmarks/cpu_pairs.py has them.
"""

from __future__ import annotations

from benchmarks.cpu_pairs import ROOT, Side, compare, length, parser

DEFAULTS = ("record.health", "record.diagnose", "record.schedule", "controller.record-tokens")
"""What is on unless a config says otherwise."""
SWITCHES = (*DEFAULTS, "record.timeline", "record.tensorboard")
"""What is on in one run and off in the other. Explanations of the mismatch have a bound of their own, and Weights &
Biases is a program of its own."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", default=SWITCHES, metavar="FIELD", help="what is on and off")
    options.add_argument("--defaults", dest="only", action="store_const", const=DEFAULTS, help="what is on by default")
    args, overrides = options.parse_known_args()

    def side(name: str, switch: str) -> Side:
        switches = (word for field in args.only for word in (f"--{field}", switch))
        return Side(name, ROOT, (*switches, *length(args), *overrides))

    compare(side("recorded", "True"), side("not recorded", "False"), args.pairs)


if __name__ == "__main__":
    main()
