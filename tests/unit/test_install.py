"""What docs/install.md installs: the lists of versions are pyproject.toml's, and the command finds its config."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from torchtitan_rl.cli import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LISTS = {
    device: [
        line for line in (ROOT / f"requirements-{device}.txt").read_text().splitlines() if not line.startswith("#")
    ]
    for device in ("cpu", "cuda")
}


@pytest.mark.parametrize("device", LISTS)
def test_a_list_has_one_version_of_everything_that_the_project_names(device):
    listed = [Requirement(line) for line in LISTS[device]]
    assert all(re.fullmatch(r"==[^,*]+", str(package.specifier)) and not package.url for package in listed)
    versions = {canonicalize_name(package.name): str(package.specifier).removeprefix("==") for package in listed}
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"][device]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), line


def test_the_list_leaves_out_what_a_cpu_has_no_use_for():
    names = {canonicalize_name(Requirement(line).name) for line in LISTS["cpu"]}
    assert not {name for name in names if name.startswith(("nvidia-", "cuda-"))}
    assert names.isdisjoint({"torchvision", "torchaudio", "torchcodec"}) and "torch==2.13.0+cpu" in LISTS["cpu"]


def test_the_page_names_the_wheel_of_this_version():
    wheels = re.findall(r"torchtitan_rl-\S+\.whl", (ROOT / "docs" / "install.md").read_text())
    assert wheels == [f"torchtitan_rl-{PROJECT['version']}-py3-none-any.whl"] * 2


def test_the_package_has_the_quickstarts_config(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main.QUICKSTART.read_bytes() == (ROOT / "configs" / "quickstart.py").read_bytes()
    assert main.main(["quickstart", "--dry-run", "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"{main.QUICKSTART}: valid; nothing was started\n"
    assert main.main(["quickstart", "--dry-run", "--sed", "3"]) == 1
    assert "did you mean --seed?" in capsys.readouterr().err
