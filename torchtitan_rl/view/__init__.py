"""A web page over runs: health, curves, evaluations, rollouts. It only reads."""
