"""The rules by which `diagnose` looks at a run, by area."""
