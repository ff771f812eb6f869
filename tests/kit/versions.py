"""Which policy version is served, and who holds which: what others ask of `PolicyVersions`."""


class Versions:
    """`holds` has a (version, holder) for each hold."""

    def __init__(self, served: int):
        self.served, self.holds = served, []

    def pin(self, version, holder):
        self.holds.append((version, holder))

    async def release(self, version, holder):
        self.holds.remove((version, holder))
