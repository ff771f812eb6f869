"""What an engine is asked for, and what a machine is answered that cannot have it; no engine runs here."""

import sys
from pathlib import Path

import pytest

from torchtitan_rl.rollout.external import external
from torchtitan_rl.rollout.installed import installed
from torchtitan_rl.tasks.sandbox import container
from torchtitan_rl.tasks.sandbox.config import SandboxConfig, check_each
from torchtitan_rl.types import Task

MIB = 2**20


def line(kind, **fields):
    config = SandboxConfig(kind=kind, image="swe/django:1", memory_gib=0.5, max_disk_mib=16, max_processes=32, **fields)
    return container.command_line(config._options(), config.limits, name="n", shared="/s")


def test_docker_is_asked_for_a_container_without_network_rights_or_more_than_its_limits():
    assert line("docker", python="/opt/py/bin/python3", read_only=(str(Path(__file__)),)) == [
        *("docker", "run", "--rm", "--pull=never", "--name", "n"),
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--security-opt", "label=disable", "--pids-limit", "33"),
        *("--memory", f"{(512 + 16 + 128) * MIB}b", "--memory-swap", f"{(512 + 16 + 128) * MIB}b"),
        *("--shm-size", f"{16 * MIB}b", "--tmpfs", f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={16 * MIB}"),
        *("--hostname", "sandbox", "--workdir", "/", "--log-driver", "none", "--no-healthcheck", "--read-only"),
        *("--mount", "type=bind,source=/s,destination=/run/sandbox,readonly"),
        *("--mount", f"type=bind,source={__file__},destination={__file__},readonly", "--detach"),
        *("--entrypoint", "/opt/py/bin/python3", "swe/django:1"),
        *("-I", "-S", "/run/sandbox/inside.py", "/run/sandbox/socket"),
    ]


def test_podman_is_asked_for_the_same_and_for_less_than_it_does_unasked():
    docker, podman = line("docker"), line("podman")
    of_podman = {"podman", "--http-proxy=false", "--image-volume=ignore", "--read-only-tmpfs=false"}
    tmpfs = f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={16 * MIB}"
    assert set(podman) - set(docker) == of_podman | {f"{tmpfs},notmpcopyup"}
    assert set(docker) - set(podman) == {"docker", tmpfs}
    writable = line("podman", writable_root=True)
    assert set(podman) - set(writable) == {"--read-only", "--read-only-tmpfs=false"}


def test_a_path_with_a_comma_would_be_another_option(tmp_path):
    (tmp_path / "a,b").touch()
    with pytest.raises(ValueError, match="has a comma"):
        line("docker", read_only=(str(tmp_path / "a,b"),))


ENGINE = """#!/bin/sh
case "$1" in
info) {info};;
image) {image};;
run) {run};;
esac
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Writes programs that answer as an engine does."""

    def write(name, info="exit 0", image="exit 0", run="exit 0"):
        program = tmp_path / name
        program.write_text(ENGINE.format(info=info, image=image, run=run))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


@pytest.mark.parametrize("kind", ["docker", "podman"])
@pytest.mark.parametrize(
    "answers, message",
    [
        (dict(info="echo Cannot connect >&2; exit 1"), "{kind} is not reachable .Cannot connect.; (start|mend)"),
        (dict(image="exit 1"), "there is no image 'swe/a' on this machine; get it before the run: {kind} pull swe/a"),
        (dict(run="echo no python3 >&2; exit 127"), "image 'swe/a' has no program 'python3' that runs .no python3."),
        (dict(run="echo its Python is 3.6 >&2; exit 1"), "image 'swe/a': its Python is 3.6"),
        (dict(run="echo no cgroup >&2; exit 125"), "{kind} cannot start a container here .no cgroup."),
        (
            dict(run='case "$*" in *--detach*) echo no socket >&2; exit 125;; esac'),
            "process 1 of a container does not reach this process .sandbox: did not start .no socket",
        ),
    ],
)
def test_a_machine_or_an_image_that_cannot_is_told_why(engine, kind, answers, message):
    engine(kind, **answers)
    with pytest.raises(RuntimeError, match=f"task.sandbox.kind='{kind}': {message.format(kind=kind)}"):
        SandboxConfig(kind=kind, image="swe/a").check("task.sandbox")


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_a_machine_without_an_engine_is_told_what_to_install(kind, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=rf"kind='{kind}': {kind} is not installed; .*apt install {kind}"):
        SandboxConfig(kind=kind, image="swe/a").check("task.sandbox")


class Family:
    """Three train tasks, whose answers are images, and no other."""

    images = ("swe/a", "swe/b", "swe/missing")

    def num_tasks(self, split):
        return len(self.images) if split == "train" else 0

    def task(self, split, index):
        return Task(id=f"{split}/{index}", prompt="", answer=self.images[index])


def of_task(task):
    return SandboxConfig(kind="podman", image=task.answer, writable_root=True)


def test_every_tasks_image_is_looked_for_before_a_run(engine, monkeypatch):
    engine("podman", image='case "$*" in *missing*) exit 1;; esac')
    monkeypatch.setattr(container, "_without_problem", {of_task(Family().task("train", 0))._options()})
    workflow = external(["true"], sandbox=of_task)
    with pytest.raises(
        RuntimeError, match=r"external.sandbox.image='swe/missing': there is no such image .* podman pull"
    ):
        workflow.check_sandbox(Family())
    check_each([of_task(Family().task("train", i)) for i in range(2)], "x")


def test_a_function_that_gives_no_sandbox_is_refused_with_the_task():
    with pytest.raises(ValueError, match=r"gave 'swe/a' for task 'train/0'; give a SandboxConfig"):
        external(["true"], sandbox=lambda task: task.answer).check_sandbox(Family())


def test_an_installed_agent_in_a_container_is_the_images_own(monkeypatch):
    monkeypatch.setenv("PATH", "")  # nothing of this machine is looked for
    workflow = installed("codex", sandbox=SandboxConfig(kind="docker", image="swe/a", python="python3.12"))
    assert workflow.agent[:2] == ["python3.12", "-m"] and "AGENT_PROGRAM" not in workflow.env
    (package,) = workflow._sandbox_of(Task(id="t", prompt="")).read_only
    assert Path(package) == Path(workflow.env["PYTHONPATH"]) / "torchtitan_rl"
    assert installed("codex", sandbox=of_task).agent[0] == "python3" != sys.executable
    assert workflow._sandbox_of(Task(id="t", prompt="")).image == "swe/a"
