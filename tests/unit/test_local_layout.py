"""The local backend is one rank on one device: anything else is refused with the numbers, before anything starts."""

import pytest

from torchtitan_rl.cli import main
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.validation.run import check_local

QUICKSTART = "configs/quickstart.py"


@pytest.fixture(autouse=True)
def in_the_repository(request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)


def test_the_quickstart_fits():
    check_local(load_config(QUICKSTART))


def test_a_trainer_of_several_ranks_is_refused_with_its_degrees():
    config = load_config(QUICKSTART)
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config.trainer.parallelism.tensor_parallel_degree = 2
    with pytest.raises(ValueError, match=r"^trainer\.parallelism: replicate x shard x tensor = 1 x 2 x 2 = 4 ranks; "):
        check_local(config)
    check_local(config, generators_only=True)  # an evaluation starts no trainer


def test_so_is_any_other_role():
    config = load_config(QUICKSTART)
    config.roles.critic = RoleConfig(trainer=TrainerConfig())
    config.roles.critic.trainer.parallelism.data_parallel_replicate_degree = 2
    with pytest.raises(ValueError, match=r"^roles\.critic\.trainer\.parallelism: .* = 2 x 1 x 1 = 2 ranks; "):
        check_local(config)


@pytest.mark.parametrize("field", ["num_replicas", "tensor_parallel_degree"])
def test_several_engines_or_ranks_of_one_are_refused(field):
    config = load_config(QUICKSTART)
    setattr(config.generator, field, 2)
    with pytest.raises(ValueError, match=rf"^generator\.{field}=2: backend='local' has one engine on one device"):
        check_local(config)


def test_the_command_line_refuses_a_dry_run_of_what_does_not_fit(capsys):
    assert main.main(["train", QUICKSTART, "--backend", "local", "--dry-run", "--generator.num-replicas", "2"]) == 1
    assert capsys.readouterr().err.startswith("error: generator.num_replicas=2: backend='local'")
    assert main.main(["train", QUICKSTART, "--backend", "local", "--dry-run", "--hosts", "tcp://there:1"]) == 1
    assert capsys.readouterr().err.startswith("error: --hosts=tcp://there:1: --backend local is this process alone")


async def test_an_unknown_backend_is_refused_before_anything_starts(tmp_path):
    from torchtitan_rl.train.controller import Controller

    config = load_config(QUICKSTART)
    config.output_dir = str(tmp_path / "run")
    with pytest.raises(ValueError, match="backend='remote': is not known; use 'actors', 'local' or 'tinker'"):
        await Controller.launch(config, backend="remote")
    assert not (tmp_path / "run").exists()
