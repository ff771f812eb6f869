"""Reading runs, finished or going on: a run as data, rules, comparisons, pictures."""
