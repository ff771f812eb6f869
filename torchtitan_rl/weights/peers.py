"""Ranks of one host that fetch the same version: each piece comes over the link once, and the others copy it.

A rank's segment holds its payload, the publication's token, and a byte per region of the version, which is 1 once the
rank has the region. Who of a host gets which piece is for the publisher to say; see `piece_server`.
"""

from __future__ import annotations

import os
import time

import torch

from torchtitan_rl.weights.piece_server import SILENT_S
from torchtitan_rl.weights.pieces import PieceManifest
from torchtitan_rl.weights.staging import Staging, opened, plan_part

__all__ = ["Peers", "Peer"]

_LOOK_EVERY_S = 0.002
_TOKEN = 32  # bytes


class Peers:
    """This rank's segment of a pull, and those of its peers."""

    def __init__(self, manifest: PieceManifest, nbytes: int, num_regions: int, staging: Staging):
        self._manifest, self._num_regions = manifest, num_regions
        self.handle, segment = staging.take(nbytes + _TOKEN + num_regions)
        self.payload, self._token, self._flags = segment.split([nbytes, _TOKEN, num_regions])
        self.give_up()  # what peers of an earlier use may read is no longer there
        self._flags.zero_()
        self._token.copy_(_token(manifest))
        self._known: dict[str, Peer | None] = {}

    def have(self, region: int) -> None:
        """Says that the region's bytes are there."""
        self._flags[region] = 1

    def give_up(self) -> None:
        """Says that no more regions will come."""
        self._token.zero_()

    def of(self, holder: list) -> Peer | None:
        """The peer that the publisher has named; None when its segment is gone or used for something else."""
        handle, rank, size = holder
        if handle not in self._known:
            nbytes = plan_part(self._manifest, rank, size).nbytes
            memory = opened(handle, nbytes + _TOKEN + self._num_regions, self._manifest.version)
            token = _token(self._manifest)
            self._known[handle] = None if memory is None else Peer(handle, rank, size, memory, nbytes, token)
        return self._known[handle]


class Peer:
    """Another rank's segment, read only."""

    def __init__(self, handle: str, rank: int, size: int, memory: torch.Tensor, nbytes: int, token: torch.Tensor):
        self.handle, self.rank, self.size = handle, rank, size
        self.payload, self._silent = memory[:nbytes], False
        self._written_token, self._flags = memory[nbytes : nbytes + _TOKEN], memory[nbytes + _TOKEN :]
        self._token = token

    def wait_for(self, region: int) -> bool:
        """Whether the peer has the region, after waiting for it; False once the peer has given up or died, or has
        fetched nothing for `SILENT_S`: then it is not waited for again."""
        progress, since = -1, time.monotonic()
        while torch.equal(self._written_token, self._token):
            if self._flags[region]:
                return True
            if (now := int(self._flags.sum())) != progress:
                progress, since = now, time.monotonic()
            self._silent |= time.monotonic() - since > SILENT_S
            if self._silent or not os.path.exists(self.handle):
                return False
            time.sleep(_LOOK_EVERY_S)
        return False


def _token(manifest: PieceManifest) -> torch.Tensor:
    return torch.tensor(list(manifest.sources[0].token.encode()), dtype=torch.uint8)
