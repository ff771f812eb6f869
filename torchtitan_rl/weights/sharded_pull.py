"""How a rank fetches its part of a version that is published in pieces, while its engine samples."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from io import FileIO
from itertools import chain, zip_longest
from typing import NamedTuple

import torch

from torchtitan_rl.weights import layout
from torchtitan_rl.weights.peers import Peer, Peers
from torchtitan_rl.weights.piece_server import SILENT_S, limit_silence, own_host, receive, receive_message, send_message
from torchtitan_rl.weights.pieces import MAX_PIECE_BYTES, Box, Piece, PieceManifest, Source, regions
from torchtitan_rl.weights.staging import Staging, part_box, plan_part

__all__ = ["pull", "NUM_TRANSFERS"]

logger = logging.getLogger(__name__)

NUM_TRANSFERS = 4
"""Transfers at a time: while one is checked and copied, others keep the link busy. Each holds one piece at most."""


class WantedPiece(NamedTuple):
    """A piece that a rank needs, its index in the version, and its index at the source."""

    piece: Piece
    region: int
    at_source: int


PieceBatch = tuple[Source, list[WantedPiece]]


def pull(
    manifest: PieceManifest, rank: int, size: int, staging: Staging, *, verify: bool
) -> tuple[layout.Manifest, torch.Tensor]:
    """(manifest, payload) of the part of generator rank `rank` of `size`; rank 0 of 1 fetches whole tensors.

    Pieces of this rank's own host come from its publisher's memory, others over the network, and those that another
    rank of this host fetches from that rank's memory. With `verify` the checksum of every piece is checked. Raises
    RuntimeError naming the version and the host for a publisher that is gone or sends nothing for `SILENT_S`, and for a
    wrong checksum.
    """
    pull = _Pull(manifest, rank, size, staging, verify)
    try:
        pull.fetch()
    except BaseException:
        pull.peers.give_up()
        raise
    finally:
        pull.close()
    logger.debug("version %s: bytes %s", manifest.version, dict(pull.num_bytes))
    return pull.plan, pull.peers.payload


class Discarded(RuntimeError):
    """A publisher no longer offers what the manifest says: the version was discarded, or published again."""


class _Pull:
    def __init__(self, manifest: PieceManifest, rank: int, size: int, staging: Staging, verify: bool):
        self.manifest, self.rank, self.size, self.verify = manifest, rank, size, verify
        self.plan = plan_part(manifest, rank, size)
        self.host, self.regions = own_host(), regions(manifest.sources)
        self.shapes = {name: entry.shape for name, entry in manifest.stored().items()}
        self.peers = Peers(manifest, self.plan.nbytes, len(self.regions), staging)
        self.holder = [self.peers.handle, rank, size]
        self.tensors = _tensors(manifest, self.plan, self.peers.payload)
        self.num_bytes: Counter[str] = Counter()
        """Bytes by where they came from: `link`, `host` (its publishers), `peer` (its other ranks)."""
        self._claimed: list[tuple[Source, WantedPiece, list]] = []
        self._files: dict[int, FileIO | None] = {}
        """By source of this host: its segment."""
        self._connections: dict[tuple[int, int], socket.socket] = {}
        """By thread and source."""
        self._scratch: dict[int, torch.Tensor] = {}
        self._failed, self._counting = threading.Event(), threading.Lock()

    def fetch(self) -> None:
        self._in_parallel([(source, run, False) for source, run in self._runs()])
        retries: dict[int, tuple[Source, list[WantedPiece]]] = {}
        for source, wanted, holder in self._claimed:
            if not self._from_peer(wanted, holder):
                retries.setdefault(source.rank, (source, []))[1].append(wanted)
        self._in_parallel(
            [(source, run, True) for source, all_wanted in retries.values() for run in _bounded(all_wanted)]
        )

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for file in filter(None, self._files.values()):
            file.close()

    def _runs(self) -> list[PieceBatch]:
        """The regions to fetch, in requests of one source each; sources take turns, so that the links of several hosts
        are busy at the same time."""
        wanted_by_source: dict[int, tuple[Source, list[WantedPiece]]] = {}
        for region, ((name, box), offers) in enumerate(self.regions.items()):
            if self._needs(name, box):
                here = [offer for offer in offers if offer[0].host == self.host]
                source, index = here[0] if here else offers[region % len(offers)]
                wanted = WantedPiece(source.pieces[index], region, index)
                wanted_by_source.setdefault(source.rank, (source, []))[1].append(wanted)
        runs = [[(source, run) for run in _bounded(wanted)] for source, wanted in wanted_by_source.values()]
        return [run for run in chain.from_iterable(zip_longest(*runs)) if run is not None]

    def _needs(self, name: str, box: Box) -> bool:
        part = self._part(name)
        inside = [
            0 <= first - its_first and first + length <= its_first + its_length
            for first, length, its_first, its_length in zip(box.offsets, box.shape, part.offsets, part.shape)
        ]
        apart = [
            first + length <= its_first or its_first + its_length <= first
            for first, length, its_first, its_length in zip(box.offsets, box.shape, part.offsets, part.shape)
        ]
        if not all(inside) and not any(apart):
            raise RuntimeError(
                f"policy_version={self.manifest.version}: {name} was cut into pieces that {self.size} generator ranks "
                "cannot share; trainer and generator have different models"
            )
        return all(inside)

    def _part(self, name: str) -> Box:
        return part_box(name, self.shapes[name], self.rank, self.size)

    def _place(self, piece: Piece) -> torch.Tensor:
        return self.tensors[piece.name][piece.box.within(self._part(piece.name))]

    def _in_parallel(self, tasks: list[tuple[Source, list[WantedPiece], bool]]) -> None:
        self._scratch.clear()
        with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="pieces") as threads:
            futures = [threads.submit(self._task, *task) for task in tasks]
            wait(futures)
        for future in futures:
            future.result()

    def _task(self, source: Source, run: list[WantedPiece], force: bool) -> None:
        if self._failed.is_set():
            return
        try:
            memory = self._memory(source) if source.host == self.host else None
            if memory is not None:
                self._copy(source, memory, run)
            else:
                self._transfer(source, run, force)
        except (OSError, EOFError) as error:
            self._failed.set()
            raise RuntimeError(f"{self._who(source)} {_reason(error)}; see the trainer's log there") from error
        except BaseException:
            self._failed.set()
            raise

    def _who(self, source: Source) -> str:
        name, address = source.host.split("/")[0], ":".join(map(str, source.address))
        return f"policy_version={self.manifest.version}: host {name} ({address}, trainer rank {source.rank})"

    def _memory(self, source: Source) -> FileIO | None:
        """A publisher's segment on this host; None when it cannot be opened, for example from another container."""
        if source.rank not in self._files:
            self._files[source.rank] = _opened(source)
        return self._files[source.rank]

    def _copy(self, source: Source, memory: FileIO, run: list[WantedPiece]) -> None:
        # Read, not mapped: the publisher's pages would count as this rank's.
        for wanted in run:
            self._take(source, wanted, "host", partial(_read, memory, wanted.piece.start))

    def _take(self, source: Source, wanted: WantedPiece, came_from: str, fill: Callable[[memoryview], None]) -> None:
        """Fills a piece by `fill(memory)` and checks it. A piece that is not contiguous in the payload is filled in
        memory of this thread and then copied."""
        place = self._place(wanted.piece)
        data = place.reshape(-1).view(torch.uint8) if place.is_contiguous() else self._buffer(wanted.piece.nbytes)
        fill(data.numpy().data)
        if self.verify and layout.checksum(data) != wanted.piece.checksum:
            problem = f"the checksum of {wanted.piece.name} is wrong; publish the version again"
            raise RuntimeError(f"{self._who(source)}: {problem}")
        if not place.is_contiguous():
            place.copy_(data.view(place.dtype).view(place.shape))
        self._have(wanted, came_from)

    def _transfer(self, source: Source, run: list[WantedPiece], force: bool) -> None:
        connection = self._connection(source)
        indices = [wanted.at_source for wanted in run]
        request = {"token": source.token, "host": self.host, "holder": self.holder, "pieces": indices, "force": force}
        send_message(connection, request)
        header = receive_message(connection)
        if header is None:
            raise EOFError("closed the connection")
        if "error" in header:
            raise Discarded(f"{self._who(source)} {header['error']}; pin a version to keep it, or pull the newest")
        for wanted in run:
            if (holder := header["claimed"].get(str(wanted.at_source))) is not None:
                self._claimed.append((source, wanted, holder))
                continue
            self._take(source, wanted, "link", partial(receive, connection))

    def _connection(self, source: Source) -> socket.socket:
        key = threading.get_ident(), source.rank
        if key not in self._connections:
            self._connections[key] = connection = socket.create_connection(source.address, SILENT_S)
            limit_silence(connection)
        return self._connections[key]

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """This thread's memory for one piece that does not lie in one part of the payload."""
        thread_id = threading.get_ident()
        if thread_id not in self._scratch or len(self._scratch[thread_id]) < nbytes:
            self._scratch[thread_id] = torch.empty(max(nbytes, MAX_PIECE_BYTES), dtype=torch.uint8)
        return self._scratch[thread_id][:nbytes]

    def _have(self, wanted: WantedPiece, came_from: str) -> None:
        self.peers.have(wanted.region)
        with self._counting:
            self.num_bytes[came_from] += wanted.piece.nbytes

    def _from_peer(self, wanted: WantedPiece, holder: list) -> bool:
        """Copies a piece that another rank of this host has fetched; False where that rank has it no more, or will not
        get it."""
        peer = self.peers.of(holder)
        if peer is None or not peer.wait_for(wanted.region):
            return False
        piece, place = wanted.piece, self._place(wanted.piece)
        place.copy_(_place_at(self.manifest, peer, piece))
        if layout.checksum(place.contiguous().reshape(-1).view(torch.uint8)) != piece.checksum:
            return False  # the peer uses its memory for another version already
        self._have(wanted, "peer")
        return True


def _tensors(manifest: PieceManifest, plan: layout.Manifest, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts by the names that pieces have, as plain tensors."""
    stored = {manifest.aliases.get(name, name): entry for name, entry in plan.entries.items()}
    return {name: entry.view(payload).as_subclass(torch.Tensor) for name, entry in stored.items()}


def _place_at(manifest: PieceManifest, peer: Peer, piece: Piece) -> torch.Tensor:
    """A piece in a peer's payload."""
    tensors = _tensors(manifest, plan_part(manifest, peer.rank, peer.size), peer.payload)
    part = part_box(piece.name, manifest.stored()[piece.name].shape, peer.rank, peer.size)
    return tensors[piece.name][piece.box.within(part)]


def _opened(source: Source) -> FileIO | None:
    try:
        file = open(source.handle, "rb", buffering=0)
    except OSError:
        return None
    if os.fstat(file.fileno()).st_size == source.nbytes:
        return file
    file.close()  # with process ids of its own, a container may have another process of that number
    return None


def _read(memory: FileIO, start: int, place: memoryview) -> None:
    """Fills `place` with a segment's bytes from `start` on."""
    done = 0
    while done < len(place):
        count = os.preadv(memory.fileno(), [place[done:]], start + done)
        if count == 0:
            raise EOFError("has a shorter segment than it said")
        done += count


def _bounded(wanted: list[WantedPiece]) -> list[list[WantedPiece]]:
    """Runs of pieces of `MAX_PIECE_BYTES` together at most, or of one piece."""
    runs: list[list[WantedPiece]] = []
    size = 0
    for one in wanted:
        if not runs or size + one.piece.nbytes > MAX_PIECE_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(one)
        size += one.piece.nbytes
    return runs


def _reason(error: BaseException) -> str:
    if isinstance(error, BlockingIOError | TimeoutError):
        return f"sent nothing for {SILENT_S:g} s"
    return f"is gone ({error})"
