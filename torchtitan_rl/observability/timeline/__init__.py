"""Who did what, when: spans of every process of a run, on one clock. Off, nothing here is on a run's path."""
