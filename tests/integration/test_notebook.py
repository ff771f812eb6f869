"""The controller notebook runs from top to bottom on the tiny model."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.examples import Block, run_python

DOCS = Path(__file__).parents[2] / "docs"
LAUNCH = "await Controller.launch(config)"


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setenv("CONFIG", str(DOCS.parent / "configs" / "quickstart.py"))
    return nbformat.read(DOCS / "controller.ipynb", as_version=4)


def test_the_cells_run_in_this_process(notebook, loop, tmp_path, monkeypatch):
    """The same cells on the local backend, with a shorter warm start."""
    monkeypatch.chdir(tmp_path)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(LAUNCH in source for source in cells) == 1
    scope = {}
    try:
        for number, source in enumerate(cells):
            source = source.replace(LAUNCH, LAUNCH.replace("(config)", '(config, backend="local")'))
            source = source.replace("supervised.num_steps = 60", "supervised.num_steps = 4")
            run_python(Block(f"docs/controller.ipynb, cell {number}:1", "python", "", source), scope, loop)
    except BaseException:
        if "controller" in scope:
            loop.run_until_complete(scope["controller"].close())
        raise
    assert len(scope["rewards"]) == 5 and scope["controller"].state.step == 5
    assert scope["again"].policy_versions != scope["completion"].policy_versions


@pytest.mark.slow  # `scripts/docs_check.sh` runs it; above are its cells without a kernel and without actors
def test_controller_notebook(notebook, tmp_path):
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
