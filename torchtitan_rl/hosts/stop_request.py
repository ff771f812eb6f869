"""What a controller and the launchers above it agree on about SIGTERM: it asks for a checkpoint."""

__all__ = ["PREEMPTED_STATUS", "SAME_REQUEST_S"]

PREEMPTED_STATUS = 75
"""The exit status of a run that was asked to stop and has written a checkpoint: EX_TEMPFAIL of sysexits.h, "try again
later"."""
SAME_REQUEST_S = 5.0
"""Seconds within which several SIGTERMs are one request: Slurm sends two, and to every process of a run, and a launcher
passes on what it gets."""
