"""What models have saved, on disk: `ROOT/MODEL/weights/NAME`, to train on, `ROOT/MODEL/sampler_weights/NAME`, and
`ROOT/MODEL/external_weights/NAME`, in Hugging Face's form.

A checkpoint is a directory with `checkpoint.json`, which is written last: a directory without it was cut off.
`files.json` has a checksum of every other file, which is compared before the checkpoint is loaded. Models are described
by `model.json`. Everything is found again after a restart.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError

from torchtitan_rl.serve.tinker.faults import Fault, user
from torchtitan_rl.weights.checkpoint import checksums, damage, has_checksums, write_checksums

__all__ = ["Checkpoint", "SavedStates", "KINDS", "ModelRecord", "RECORDS", "require_intact"]

logger = logging.getLogger(__name__)

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The part of a path -> the protocol's word."""
RECORDS = ("checkpoint.json", "files.json")
"""Files of a checkpoint that are the server's own, not what was saved."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,127}")
_SCHEME = "tinker://"
_WRITING = ".writing"
"""The end of the name of a directory that is no checkpoint yet."""
_REPLACED = ".replaced"
"""The end of the name of a checkpoint that another one takes the place of."""


def _moment(text: str) -> str:
    """Raises ValueError unless the text is a moment with a time zone: one without cannot be compared."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("has no time zone")
    return text


_Moment = Annotated[str, AfterValidator(_moment)]
"""A moment in ISO 8601, with a time zone."""


@dataclass(kw_only=True, slots=True)
class ModelRecord:
    """What a model is, besides its weights."""

    model_id: str
    base_model: str
    lora_rank: int = 0
    """0: all parameters train."""
    train_attn: bool = True
    train_mlp: bool = True
    user_metadata: dict[str, Any] | None = None
    last_request: str = ""
    """When the last request came, in ISO 8601."""

    @property
    def parts(self) -> tuple[str, ...]:
        return ("attention",) * self.train_attn + ("mlp",) * self.train_mlp


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that is complete."""

    model: ModelRecord
    kind: str
    """A key of `KINDS`."""
    name: str
    time: _Moment
    size_bytes: int = 0
    expires_at: _Moment | None = None
    user_metadata: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        """As the protocol writes it."""
        return f"{_SCHEME}{self.model.model_id}/{self.kind}/{self.name}"

    def as_wire(self) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": self.time,
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at,
        }


_RECORD, _MODEL_RECORD = TypeAdapter(Checkpoint), TypeAdapter(ModelRecord)


class SavedStates:
    """The checkpoints below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        for cut_off in root.glob(f"*/*/.*{_WRITING}"):  # of an earlier server
            shutil.rmtree(cut_off, ignore_errors=True)
        for replaced in root.glob(f"*/*/.*{_REPLACED}"):
            _settle(replaced, replaced.with_name(replaced.name[1 : -len(_REPLACED)]))

    def directory(self, model_id: str, kind: str, name: str) -> Path:
        """Where a checkpoint is. Raises Fault for names that are not plain."""
        if not _MODEL_ID.fullmatch(model_id) or kind not in KINDS or not _NAME.fullmatch(name):
            raise user(
                f"checkpoint={f'{model_id}/{kind}/{name}'[:160]!r}: is not MODEL/weights/NAME or "
                "MODEL/sampler_weights/NAME with a NAME of letters, digits, '.', '_', '=' and '-'; use another name"
            )
        return self.root / model_id / kind / name

    def begin(self, record: ModelRecord, kind: str, name: str, *, overwrite: bool) -> Path:
        """An empty directory to write a checkpoint into. Raises Fault where one is and may not be overwritten."""
        final = self.directory(record.model_id, kind, name)
        if (final / "checkpoint.json").exists() and not overwrite:
            raise user(f"path={name!r}: the model has saved it already; use another name, or overwrite=True")
        writing = final.with_name(f".{name}{_WRITING}")
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        return writing

    @contextmanager
    def deleted_on_error(self, writing: Path) -> Iterator[None]:
        """Deletes a directory of `begin` when the block raises. Not when it is cancelled: the trainer writes on into
        the directory, which the next server deletes."""
        try:
            yield
        except Exception:
            shutil.rmtree(writing, ignore_errors=True)
            raise

    def commit(
        self,
        record: ModelRecord,
        kind: str,
        name: str,
        *,
        ttl_s: int | None,
        metadata: Any,
        files: dict[str, list] | None = None,
    ) -> Checkpoint:
        """Makes a checkpoint of what `begin` gave and was written into. `files`: checksums that are known already, see
        `weights.checkpoint.checksums`; `commit` computes the others."""
        final = self.directory(record.model_id, kind, name)
        writing, now = final.with_name(f".{name}{_WRITING}"), datetime.now(UTC)
        checkpoint = Checkpoint(
            model=record,
            kind=kind,
            name=name,
            time=now.isoformat(),
            size_bytes=sum(file.stat().st_size for file in writing.rglob("*") if file.is_file()),
            expires_at=None if ttl_s is None else (now + timedelta(seconds=ttl_s)).isoformat(),
            user_metadata=metadata,
        )
        known = files or {}
        new_files = [f for f in sorted(writing.rglob("*")) if f.is_file() and str(f.relative_to(writing)) not in known]
        write_checksums(writing, known | checksums(writing, new_files))
        self.describe(record)
        _write_json(writing / "checkpoint.json", asdict(checkpoint))
        replaced = final.with_name(f".{name}{_REPLACED}")
        if final.exists():  # at every moment one of the two is there whole: a killed server leaves what `_settle` mends
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        writing.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        return checkpoint

    def describe(self, record: ModelRecord) -> None:
        """Writes down what a model is."""
        directory = self.root / record.model_id
        directory.mkdir(parents=True, exist_ok=True)
        _write_json(directory / "model.json", asdict(record))

    def find(self, path: str, kind: str | None = None) -> tuple[Checkpoint, Path]:
        """The checkpoint that a `tinker://` path names, and its directory. Raises Fault for one that is not there."""
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3:
            raise user(
                f"path={path[:160]!r}: is not tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
            )
        if kind is not None and parts[1] != kind:
            verb = "train on" if kind == "weights" else "sample from"
            raise user(f"path={path[:160]!r}: is none to {verb}; give tinker://MODEL/{kind}/NAME")
        directory = self.directory(*parts)
        if (checkpoint := self._read(directory)) is None:
            raise user(f"path={path[:160]!r}: there is no such checkpoint; list_user_checkpoints names those there are")
        return checkpoint, directory

    def remove(self, model_id: str, checkpoint_id: str) -> None:
        """Deletes a checkpoint. Raises Fault (404) for one that is not there."""
        _, directory = self.existing(model_id, checkpoint_id)
        (directory / "checkpoint.json").unlink()
        shutil.rmtree(directory, ignore_errors=True)

    def set_ttl(self, model_id: str, checkpoint_id: str, ttl_s: int | None) -> None:
        """Lets a checkpoint expire that many seconds from now; None: never. Raises Fault as `remove` does."""
        checkpoint, directory = self.existing(model_id, checkpoint_id)
        checkpoint.expires_at = None if ttl_s is None else (datetime.now(UTC) + timedelta(seconds=ttl_s)).isoformat()
        _write_json(directory / "checkpoint.json", asdict(checkpoint))

    def existing(self, model_id: str, checkpoint_id: str) -> tuple[Checkpoint, Path]:
        """A model's checkpoint and its directory. Raises Fault (404) for one that is not there."""
        try:
            return self.find(f"{_SCHEME}{model_id}/{checkpoint_id}")
        except Fault as fault:
            raise user(fault.message, status=404) from None

    def of(self, model_id: str) -> list[Checkpoint]:
        """A model's checkpoints, newest first."""
        checkpoints = []
        for kind in KINDS:
            for directory in (self.root / model_id / kind).glob("[!.]*"):
                if (checkpoint := self._read(directory)) is not None:
                    checkpoints.append(checkpoint)
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.time, reverse=True)

    def models(self) -> list[ModelRecord]:
        """The models that have been, the last used first."""
        records = []
        for file in self.root.glob("*/model.json"):
            if (record := self._record(file)) is not None:
                records.append(record)
        return sorted(records, key=lambda record: record.last_request, reverse=True)

    def model(self, model_id: str) -> ModelRecord | None:
        if not _MODEL_ID.fullmatch(model_id):
            return None
        return self._record(self.root / model_id / "model.json")

    def _record(self, file: Path) -> ModelRecord | None:
        """The model that a file describes; None where there is none, and for a damaged one, with a log line."""
        try:
            return _MODEL_RECORD.validate_json(file.read_bytes())
        except OSError:
            return None
        except ValidationError as error:
            logger.warning("%s: is damaged, and its model is left out: %s", file, _first(error))
            return None

    def _read(self, directory: Path) -> Checkpoint | None:
        """The checkpoint in a directory; None where there is none, or it has expired, which deletes it. One whose
        record is damaged is none, and a log line says so."""
        file = directory / "checkpoint.json"
        try:
            checkpoint = _RECORD.validate_json(file.read_bytes())
        except OSError:
            return None
        except ValidationError as error:
            logger.warning("%s: is damaged, and its checkpoint is left out: %s", file, _first(error))
            return None
        if checkpoint.expires_at is not None and datetime.fromisoformat(checkpoint.expires_at) <= datetime.now(UTC):
            shutil.rmtree(directory, ignore_errors=True)
            return None
        return checkpoint


def _settle(replaced: Path, final: Path) -> None:
    """Deletes a checkpoint that another one has replaced, or gives it its name back where the other one never came."""
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        replaced.rename(final)


async def require_intact(directory: Path) -> None:
    """Raises Fault for a checkpoint whose files are not what was written. One of an older server has no checksums: it
    is used, and a log line says so."""
    if not has_checksums(directory):
        return logger.warning("%s: was saved without checksums by an older server; it is used unchecked", directory)
    if problem := await asyncio.to_thread(damage, directory):
        raise user(f"checkpoint is damaged: {problem}; use another one")


def _first(error: ValidationError) -> str:
    """What a damaged record has wrong first."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'JSON'}: {first['msg']}"


def _write_json(file: Path, content: dict) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1))
    new.replace(file)
