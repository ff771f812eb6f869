"""Generators without a trainer: the weights of a directory are the one version there is."""

from __future__ import annotations

__all__ = ["OneVersion"]


class OneVersion:
    """Stands in for `PolicyVersions` where generators hold one version: the weights of a Hugging Face directory."""

    def __init__(self) -> None:
        self.served: int | None = None
        """The version that `SamplingClient.load_hf` gave the weights; None before that call."""
        self.publications: list[int] = []
        """Empty, as nobody publishes."""

    async def publish(self) -> int:
        """Raises RuntimeError: nobody trains."""
        raise RuntimeError("publish: these generators hold the weights of a directory; launch without hf_weights")

    def pin(self, version: int, holder: str) -> None:
        """Raises ValueError: without a store, no version but the one that generators hold exists."""
        raise ValueError(
            f"policy_version={version}: is not published; these generators hold the weights of a directory, as version "
            f"{self.served}, and nobody trains; leave policy_version out"
        )

    async def release(self, version: int, holder: str) -> None:
        """Does nothing: no version is ever pinned."""
