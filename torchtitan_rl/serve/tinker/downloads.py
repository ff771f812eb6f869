"""Weights to take away, in the forms that PEFT and transformers load, behind links that expire.

A link is a capability: whoever has its 256 random bits may read its files, without a key, until it expires or the
checkpoint is deleted. So a link can be given to a browser or to curl, as the SDK does.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from safetensors.torch import load_file

from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.serve.tinker.faults import Fault, user
from torchtitan_rl.serve.tinker.saved_states import RECORDS, Checkpoint, require_intact
from torchtitan_rl.weights import checkpoint as run_checkpoint

__all__ = ["Downloads", "Link", "write_hf_form"]

_COMPLETE = "checkpoint_complete"
"""An empty file in every archive: the SDK's command line looks for it before it sends an adapter to a hub."""


@dataclass(kw_only=True, slots=True)
class Link:
    """Files that can be read under a name that nobody guesses."""

    token: str
    checkpoint: Path
    """The directory of the checkpoint: where it was deleted, the link leads nowhere."""
    files: dict[str, Path]
    expires: float
    """By `time.time()`."""

    @property
    def expires_at(self) -> datetime:
        return datetime.fromtimestamp(self.expires, UTC)


class Downloads:
    """The links of a server, and the archives that it has written."""

    def __init__(
        self, directory: Path, write_form: Callable[[Checkpoint, Path, Path], None], *, valid_s: float
    ) -> None:
        """`directory`: where archives are until their links expire; what an earlier server left there is deleted.
        `write_form(checkpoint, source, target)` writes what goes into an archive, as `write_hf_form` does."""
        self._directory, self._write_form, self._valid_s = directory, write_form, valid_s
        self._links: dict[str, Link] = {}
        self._archives: dict[tuple[Path, str], asyncio.Future[Link]] = {}
        shutil.rmtree(directory, ignore_errors=True)

    def link(self, checkpoint: Path, files: dict[str, Path]) -> Link:
        """A new link to files of a checkpoint's directory."""
        self._expire()
        link = Link(
            token=secrets.token_urlsafe(32), checkpoint=checkpoint, files=files, expires=time.time() + self._valid_s
        )
        self._links[link.token] = link
        return link

    async def archive(self, checkpoint: Checkpoint, source: Path, timeout_s: float) -> Link:
        """A link to a tar of a checkpoint, which is written once. Raises Fault (503) while it is not done after
        `timeout_s`, on which the SDK asks again, and Fault for a checkpoint that is damaged."""
        self._expire()
        key = source, checkpoint.time
        if key not in self._archives:
            self._archives[key] = asyncio.ensure_future(self._archived(checkpoint, source))
        writing = self._archives[key]
        await asyncio.wait([writing], timeout=timeout_s)
        if not writing.done():
            raise Fault(f"path={checkpoint.path!r}: its archive is being written; ask again", "server", status=503)
        if writing.exception() is not None and self._archives.get(key) is writing:  # others may ask at once
            del self._archives[key]
        return writing.result()

    async def _archived(self, checkpoint: Checkpoint, source: Path) -> Link:
        await require_intact(source)
        self._directory.mkdir(parents=True, exist_ok=True)
        file = self._directory / f"{secrets.token_hex(8)}.tar"
        await asyncio.to_thread(self._write_archive, checkpoint, source, file)
        return self.link(source, {f"{checkpoint.name}.tar": file})

    def _write_archive(self, checkpoint: Checkpoint, source: Path, file: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self._directory) as form:
            self._write_form(checkpoint, source, Path(form))
            (Path(form) / _COMPLETE).touch()
            try:
                with tarfile.open(file, "w") as tar:
                    for part in sorted(Path(form).iterdir()):
                        tar.add(part, arcname=part.name)
            except BaseException:
                file.unlink(missing_ok=True)  # no link leads to it, and what has no link is never deleted
                raise

    def file(self, token: str, name: str) -> Path:
        """The file behind a link. Raises Fault (404) where there is none any more."""
        self._expire()
        link = self._links.get(token)
        file = None if link is None or not (link.checkpoint / "checkpoint.json").exists() else link.files.get(name)
        if file is None or not file.is_file():
            raise user("download: the link has expired, or its checkpoint was deleted; ask for a new link", status=404)
        return file

    def _expire(self) -> None:
        for token in [token for token, link in self._links.items() if link.expires <= time.time()]:
            for file in self._links.pop(token).files.values():
                if file.parent == self._directory:
                    file.unlink(missing_ok=True)
        done = {key: writing for key, writing in self._archives.items() if writing.done() and not writing.exception()}
        for key, writing in done.items():
            if writing.result().token not in self._links:
                del self._archives[key]


def write_hf_form(checkpoint: Checkpoint, source: Path, target: Path, *, model: ModelConfig, model_dir: Path) -> None:
    """Writes what PEFT loads of a LoRA model, and what transformers loads of one whose parameters all train, into the
    empty directory `target`. `model_dir` has the model's config.json and tokenizer. Raises Fault for a checkpoint that
    has neither."""
    adapter, weights = run_checkpoint.adapter_dir(source), source / "weights.safetensors"
    if checkpoint.kind == "external_weights":
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*RECORDS), dirs_exist_ok=True)
    elif adapter.is_dir():
        shutil.copytree(adapter, target, dirs_exist_ok=True)
    elif weights.is_file():
        from torchtitan_rl.model.spec import build_spec
        from torchtitan_rl.weights.hf import write_hf_dir

        shutil.copytree(model_dir, target, dirs_exist_ok=True)
        spec = build_spec(model)
        write_hf_dir(load_file(weights), spec.state_dict_adapter(spec.model, None), target)
    else:
        raise user(
            f"path={checkpoint.path!r}: is a state to go on training from, with the optimizer's; "
            "save_weights_for_sampler or save_weights_external writes the weights alone: ask for an archive of those"
        )
