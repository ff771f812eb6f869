"""Reading a run's timeline: where the time of a step went, how busy each process was, what a step waited for."""
