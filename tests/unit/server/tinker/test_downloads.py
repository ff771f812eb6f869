"""Links to weights: how long they are valid, and what a slow archive answers."""

import asyncio
import tarfile
import time

import pytest

from torchtitan_rl.server.tinker.checkpoints import Checkpoint, ModelRecord
from torchtitan_rl.server.tinker.downloads import Downloads
from torchtitan_rl.server.tinker.faults import Fault

CHECKPOINT = Checkpoint(
    model=ModelRecord(model_id="ab12:train:0", base_model="base"), kind="weights", name="kept", time="2026-11-24"
)


def saved(directory):
    directory.mkdir()
    (directory / "checkpoint.json").write_text("{}")
    return directory


def write(checkpoint, source, target):
    (target / "weights").write_text("numbers")


def test_an_archive_is_written_once_and_goes_with_its_link(tmp_path):
    async def run():
        source, written = saved(tmp_path / "kept"), []
        downloads = Downloads(tmp_path / "archives", lambda *of: written.append(write(*of)), valid_s=0.5)
        link = await downloads.archive(CHECKPOINT, source, 5.0)
        assert await downloads.archive(CHECKPOINT, source, 5.0) == link and len(written) == 1
        file = downloads.file(link.token, "kept.tar")
        assert tarfile.open(file).getnames() == ["checkpoint_complete", "weights"]
        for token, name in ((link.token, "other.tar"), ("x", "kept.tar"), (link.token, "../kept.tar")):
            with pytest.raises(Fault, match="has expired, or its checkpoint was deleted"):
                downloads.file(token, name)
        time.sleep(0.6)
        with pytest.raises(Fault, match="has expired"):
            downloads.file(link.token, "kept.tar")
        assert not file.exists() and not list((tmp_path / "archives").iterdir())
        assert (await downloads.archive(CHECKPOINT, source, 5.0)).token != link.token and len(written) == 2

    asyncio.run(run())


def test_a_link_of_a_deleted_checkpoint_leads_nowhere(tmp_path):
    async def run():
        source = saved(tmp_path / "kept")
        downloads = Downloads(tmp_path / "archives", write, valid_s=60.0)
        link = await downloads.archive(CHECKPOINT, source, 5.0)
        (source / "checkpoint.json").unlink()
        with pytest.raises(Fault, match="its checkpoint was deleted") as fault:
            downloads.file(link.token, "kept.tar")
        assert fault.value.status == 404

    asyncio.run(run())


def test_a_slow_archive_is_asked_for_again_and_one_that_failed_is_written_again(tmp_path):
    async def run():
        source, fails = saved(tmp_path / "kept"), [True]

        def slow(checkpoint, source, target):
            time.sleep(0.3)
            if fails:
                raise OSError(f"no space left: {fails.pop()}")
            write(checkpoint, source, target)

        downloads = Downloads(tmp_path / "archives", slow, valid_s=60.0)
        with pytest.raises(Fault, match="ask again") as fault:
            await downloads.archive(CHECKPOINT, source, 0.05)
        assert fault.value.status == 503
        with pytest.raises(OSError, match="no space left"):
            await downloads.archive(CHECKPOINT, source, 5.0)
        assert (await downloads.archive(CHECKPOINT, source, 5.0)).files

    asyncio.run(run())


def test_archives_of_an_earlier_server_are_deleted(tmp_path):
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives" / "old.tar").write_text("numbers")
    Downloads(tmp_path / "archives", write, valid_s=60.0)
    assert not (tmp_path / "archives").exists()
