"""Heartbeats of a run's hosts, and how each host ended, through torchrun's store."""

from __future__ import annotations

import sys
import threading
import time

import torch.distributed as dist

__all__ = ["BEAT_S", "SILENT_S", "HeartbeatWatch"]

BEAT_S = 0.5
"""Seconds between two heartbeats. One is a few small messages to the store, and announces the end of a run too."""
SILENT_S = 10.0
"""Seconds without a heartbeat after which a host is lost: twenty heartbeats, so that neither a busy host nor a network
that parts for 5 s ends a run."""


class HeartbeatWatch(threading.Thread):
    """Writes this host's heartbeat into the store and reads other heartbeats: rank 0 reads all, other ranks read rank
    0's. No other thread uses the store from here on: a store that blocks does not block the main thread, which then
    sees that no heartbeat has arrived."""

    def __init__(self, store: dist.Store, rank: int, workers: list[str]):
        super().__init__(daemon=True)
        self.rank, self.workers = rank, workers
        self.outcome: str | None = None
        """The run's exit status, as rank 0 announced it; None before."""
        self.failures: dict[int, str] = {}
        """Rank -> the failure that the rank announced."""
        self.gone: set[int] = set()
        """Ranks that have read the outcome."""
        self.asked_at = 0.0
        """When SIGTERM came to this host or, on rank 0, to another one; 0: to none."""
        self._store, self._announcements = store, {}
        self._lock = threading.Lock()
        self._heard = {peer: (b"", time.monotonic()) for peer in (range(1, len(workers)) if rank == 0 else [0])}

    def run(self) -> None:
        for beat in range(1, sys.maxsize):
            try:
                self._exchange(beat)
            except (RuntimeError, ValueError):
                return  # the store is gone, so rank 0 is gone: `trouble` will report missing heartbeats
            time.sleep(BEAT_S)

    def _exchange(self, beat: int) -> None:
        with self._lock:
            announcements, self._announcements = self._announcements, {}
        for name, text in announcements.items():
            self._store.set(name, text)
        self._store.set(f"beat/{self.rank}", str(beat))
        for peer, (last, _) in self._heard.items():
            if (now := self._store.get(f"beat/{peer}")) != last:
                self._heard[peer] = now, time.monotonic()
            if self._store.check([f"failed/{peer}"]):
                self.failures[peer] = self._store.get(f"failed/{peer}").decode()
            if self._store.check([f"gone/{peer}"]):
                self.gone.add(peer)
            if self._store.check([f"asked/{peer}"]):
                self.asked_at = self.asked_at or time.monotonic()
        if self._store.check(["outcome"]):
            self.outcome = self._store.get("outcome").decode()

    def address(self, rank: int) -> str:
        """The name of a rank's host in errors."""
        return self.workers[rank].removeprefix("tcp://")

    def announce(self, name: str, text: str) -> None:
        """Sets a key of the store at the next beat."""
        with self._lock:
            self._announcements[name] = text

    def trouble(self) -> str | None:
        """A failure that another host has announced, or a missing heartbeat; None when all is well."""
        for peer, failure in self.failures.items():
            return f"host {self.address(peer)}: {failure}"
        for peer, (_, at) in self._heard.items():
            if peer not in self.gone and time.monotonic() - at > SILENT_S:
                return f"host {self.address(peer)}: has not been heard of for {SILENT_S:g} s"
        return None
