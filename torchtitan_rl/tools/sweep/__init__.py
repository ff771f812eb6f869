"""Sweeps: settings of a config beside each other, over seeds, as forks that share their warm start."""
