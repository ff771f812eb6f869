"""A clock that stands still until a test moves it."""


class Clock:
    """Gives `now`, in seconds: `clock.now += 5`."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now
