"""The controller notebook runs from top to bottom on the tiny model."""

from pathlib import Path

import nbclient
import nbformat

DOCS = Path(__file__).parents[2] / "docs"


def test_controller_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("CONFIG", str(DOCS.parent / "configs" / "quickstart.py"))
    notebook = nbformat.read(DOCS / "controller.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
