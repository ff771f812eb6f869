"""Every code block of the pages is run, or checked where its mark says so (`tests/examples.py`)."""

import ast
import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples import MARKS, PAGES, ROOT, blocks, checkout, run_python
from tests.integration.conftest import small_config
from torchtitan_rl.algorithm.inputs import minibatches
from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.train import step
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.train.step_metrics import StepMetrics
from torchtitan_rl.validation.run import validate
from torchtitan_rl.weights.checkpoint import hf_weights

SHELL = [block for page in PAGES for block in blocks(page, "bash")]
COMMANDS = [(block.place, *words) for block in SHELL for words in block.commands()]
STACK_ON = ("README.md",)
"""Pages whose blocks are parts of the controller: `self` is one there, on the local backend."""


def names_on(page, config, loop):
    """The names that the blocks of a page find: a config, and what is local to the loop."""
    if page not in STACK_ON:
        return {"config": config}
    controller = loop.run_until_complete(Controller.launch(config, backend="local"))
    groups = loop.run_until_complete(controller.batches.next_batch()).groups
    functions = {"training_data": step.training_data, "take_step": step.take_step, "minibatches": minibatches}
    local = {"state": controller.state, "groups": groups, "num_steps": 2, "StepMetrics": StepMetrics}
    return {"self": controller, "config": config, **local, **functions}


def check_settings(block, scope):
    """What a block sets of a run is a valid run: fields of a config by name, `config.field`, or `config()`."""
    if callable(scope["config"]):
        return validate(scope["config"]())
    targets = [target for node in ast.parse(block.code).body for target in getattr(node, "targets", [])]
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    names = {target.id for target in targets if isinstance(target, ast.Name)} & fields
    assigned = {name for name in names if dataclasses.is_dataclass(scope[name])}  # no Controller under that name
    config = scope["config"]
    if assigned:  # examples of fields are of models with long answers
        long = {"sampling__max_tokens": 600, "generator__max_model_len": 1024, "trainer__training__seq_len": 2048}
        config = small_config(Path(config.output_dir), model__shape__max_seq_len=2048, **long)
    validate(dataclasses.replace(config, **{name: scope[name] for name in assigned}))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The present directory: like a checkout, with the model that a page downloads."""
    checkout(tmp_path)
    (tmp_path / "Qwen3-0.6B").symlink_to(ROOT / "torchtitan_rl" / "assets" / "chars")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(page, loop, directory, short_run):
    (directory / "runs").mkdir()
    (directory / "runs" / "first").symlink_to(short_run.path)  # the README's first run
    trained = hf_weights(short_run.path / "checkpoints" / "step-2")
    teacher = Path(shutil.copytree(trained, directory / "path" / "to" / "teacher"))
    sizes = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 2048}))
    scope = names_on(page, small_config(directory / "runs" / "own"), loop)
    try:
        for block in blocks(page, "python"):
            if block.mark == "check":
                block.compiled()
            else:
                run_python(block, scope, loop)
                check_settings(block, scope)
    finally:
        for controller in {scope.get("self"), scope.get("controller")} - {None}:
            loop.run_until_complete(controller.close())


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.place)
def test_the_shell_of_a_page_is_marked_and_has_no_mistake_in_syntax(block):
    assert block.mark in MARKS, "a block that takes less than 20 s is run by a test of its own"
    assert subprocess.run(["bash", "-nc", block.code], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_commands_of_a_page_are_accepted(words, here, directory):
    """`train` dry, `doctor` and `show` as written; of `rehearse` the config; of the others, which need a run, the
    options."""
    from torchtitan_rl.cli import main

    _, verb, *arguments = words
    if verb in ("train", "quickstart", "sweep"):
        arguments.append("--dry-run")
    elif verb == "rehearse":
        args, overrides = main._parser(verb).parse_known_args([verb, *arguments])
        apply_overrides(config := load_config(args.config), overrides)
        return validate(config)
    elif verb not in ("doctor", "show"):
        _, unknown = main._parser(verb).parse_known_args([verb, *arguments])
        assert not unknown
        return
    ran = here(verb, *arguments)
    assert ran.returncode == 0, ran.stderr


def test_no_block_is_in_a_language_that_nobody_runs():
    fences = "".join((ROOT / page).read_text() for page in PAGES).count("```") // 2
    assert sum(len(blocks(page, kind)) for page in PAGES for kind in ("bash", "python", "", "text")) == fences
