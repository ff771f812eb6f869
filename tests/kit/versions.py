"""Which policy version is served, and who holds which: what others ask of `PolicyVersions`."""


class Versions:
    """`held` has a (version, holder) for each hold."""

    def __init__(self, served: int):
        self.served, self.held = served, []

    def pin(self, version, holder):
        self.held.append((version, holder))

    async def release(self, version, holder):
        self.held.remove((version, holder))
