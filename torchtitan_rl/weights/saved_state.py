"""Reading torch's distributed checkpoints of whoever wrote them: nothing in a file is run.

`.metadata` is a pickle, and so is each value beside the tensors, such as a learning rate. torch's own reader would call
any function that such a pickle names. Here the metadata may name the classes of the format alone, and a value what
`torch.load(weights_only=True)` admits.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["load_state", "naming_failures", "saved_names", "saved_sizes"]

_CLASSES = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},  # Python 3.13
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},  # a table of layouts by name
}
"""What a `.metadata` may name, by module; data types of torch, such as `torch.float32`, as well."""


def saved_names(directory: Path) -> list[str]:
    """The names of a distributed checkpoint's values, such as `model.norm.weight`. Raises ValueError for a file that is
    damaged or names a class that is no part of a checkpoint."""
    return list(_Reader(str(directory)).read_metadata().state_dict_metadata)


def saved_sizes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name of each tensor of a distributed checkpoint -> its size. Raises ValueError as `saved_names` does."""
    entries = _Reader(str(directory)).read_metadata().state_dict_metadata.items()
    return {name: tuple(entry.size) for name, entry in entries if hasattr(entry, "size")}


def load_state(state: dict[str, Any], directory: Path) -> None:
    """Fills the tensors and values of `state` from a distributed checkpoint, which another layout may have saved. Every
    rank of a mesh makes the call. Raises ValueError as `saved_names` does, RuntimeError as `naming_failures` does."""
    reader = _Reader(str(directory))
    reader.read_metadata()  # on every rank: torch would tell the others of the first rank's failure only
    with naming_failures(directory):
        try:
            dcp.load(state, storage_reader=reader, planner=_Planner())
        except CheckpointException as error:
            if refused := next((e for e, _ in error.failures.values() if isinstance(e, ValueError)), None):
                raise ValueError(str(refused)) from error
            raise


@contextmanager
def naming_failures(directory: Path) -> Iterator[None]:
    """The block that lets torch load a distributed checkpoint. Raises RuntimeError with the first rank's failure in the
    place of torch's `CheckpointException`. That is no `Exception`, so an actor that lets it through ends."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
        reason = str(failure) or type(failure).__name__
        raise RuntimeError(
            f"checkpoint={str(directory)!r}: rank {rank} cannot load it: {reason[:1000]}; give a checkpoint of this "
            "model whose files are all there and whole"
        ) from error


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self._get_metadata_path())
        with open(file, "rb") as stream:
            metadata = _read(_Unpickler(stream).load, str(file))
        if not isinstance(metadata, Metadata):
            raise ValueError(f"file={str(file)!r}: holds a {type(metadata).__name__}, no metadata; {_USE}")
        for info in (metadata.storage_data or {}).values():
            if PurePath(info.relative_path).name != str(info.relative_path):
                raise ValueError(
                    f"file={str(file)!r}: says that data are in {str(info.relative_path)!r}, outside of its "
                    f"directory; {_USE}"
                )
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        content = _read(lambda: torch.load(value, weights_only=True), f"{name} of a checkpoint")
        super().load_bytes(read_item, _saved(content))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of a checkpoint and was not run")


_USE = "use a checkpoint from somebody whom you trust, or a copy that is whole"


def _read(read, where: str) -> Any:
    """What `read()` returns. Raises ValueError for whatever a damaged or hostile pickle makes it raise."""
    try:
        return read()
    except Exception as error:  # a damaged pickle raises anything: KeyError, MemoryError of a length, UnicodeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"file={where!r}: {reason[:300]}; {_USE}") from error


def _saved(content: Any) -> io.BytesIO:
    """The content as torch's planner reads it: a pickle that this process wrote."""
    stream = io.BytesIO()
    torch.save(content, stream)
    stream.seek(0)
    return stream
