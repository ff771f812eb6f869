"""The pages for people: paths that they name exist, layers are those of the contract, the
README's code runs."""

import configparser
import re
import tomllib
from pathlib import Path

import pytest
import torch

from tests import excerpts
from torchtitan_rl.types import LossInputs

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def section(page: str, title: str) -> str:
    """The text under `## title`."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return text


def first_cells(text: str) -> list[list[str]]:
    """What is in backticks in the first cell of each row of a section's first table."""
    table = re.search(r"^\|---.*\n((?:\|.*\n)*)", text, re.MULTILINE)[1]
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in table.splitlines()]


def layers() -> list[list[str]]:
    """The lines of the contract, top first."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    return [line.split(" | ") for line in contracts["importlinter:contract:layers"]["layers"].split("\n") if line]


@pytest.mark.parametrize("page, title", [("docs/architecture.md", "Layers"), ("CONTRIBUTING.md", "Where things go")])
def test_the_layers_of_a_page_are_those_of_the_contract(page, title):
    assert first_cells(section(page, title)) == layers()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not link.startswith("https://") and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_configs_that_a_page_names_exist(page):
    paths = re.findall(
        r"(?<![\w/.])((?:scripts|benchmarks|configs|tests|torchtitan_rl)/[\w/]+\.(?:py|sh))", page.read_text()
    )
    assert [path for path in paths if not (ROOT / path).exists() and path != "configs/NAME.py"] == []


def test_the_page_of_config_files_has_every_file_once():
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)*)", (ROOT / "docs/configs.md").read_text(), re.MULTILINE)
    named = [name for row in "".join(tables).splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(file.stem for file in (ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_places_in_a_file_is_there(page):
    text = " ".join(page.read_text().split())
    file = r"`((?:torchtitan_rl|tests|benchmarks|scripts)/[\w/]+\.py)`"
    placed = [(name, file) for name, file in re.findall(rf"`([\w.]+)`(?: [\w,]+){{0,3}} in {file}", text)]
    placed += [(name, file) for file, name in re.findall(rf"{file}, (?:class|function) `([\w.]+)`", text)]
    missing = [place for place in placed if place[0].split(".")[-1] not in (ROOT / place[1]).read_text()]
    assert not missing


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\(([\w./]+?)(?:#[^)]*)?\)", (ROOT / "docs" / "README.md").read_text()))
    pages = {
        str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*") if path.suffix in (".md", ".ipynb")
    }
    assert linked >= pages - {"README.md"}


def test_quoted_functions_are_those_of_the_code():
    page = excerpts.PAGE.read_text()
    assert len(excerpts.EXCERPT.findall(page)) == page.count("```python") > 10
    assert page == excerpts.refreshed(page), "the code has changed: run `python -m tests.excerpts`"


def test_a_quote_is_the_whole_function_and_one_that_is_gone_is_named():
    quote = excerpts.function_source("tests/excerpts.py", "refreshed")
    assert quote.startswith("def refreshed(") and quote.count("\n") == 3
    with pytest.raises(ValueError, match="has no nowhere"):
        excerpts.function_source("tests/excerpts.py", "nowhere")


def test_the_readmes_loop_is_the_controllers():
    loop = re.search(r"^## The loop\n(.*?)^## ", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[1]
    blocks = re.findall(r"```python\n(.*?)```", loop, re.DOTALL)
    for block, name in zip(blocks, ["Controller._reinforce", "Controller.train_on"], strict=True):
        of_code = iter([line.strip() for line in excerpts.function_source(CONTROLLER, name).splitlines()])
        shown = [line.split("  #")[0].strip() for line in block.splitlines() if not line.startswith("#")]
        assert [line for line in shown if line not in of_code] == []  # each line, in the order of the code


CONTROLLER = "torchtitan_rl/train/controller.py"


def test_the_site_has_every_page():
    named = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}


def test_the_notebook_opens_by_one_command_whose_extra_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [
        word
        for page in PAGES
        for words in re.findall(r"scripts/setup\.sh((?: [a-z][a-z-]*)+)(?= |$)", page.read_text(), re.MULTILINE)
        for word in words.split()
    ]
    assert "notebook" in asked and set(asked) <= set(extras)
    assert "jupyterlab" in extras["notebook"] and "ipykernel" in extras["notebook"]
    page = (ROOT / "docs" / "see_the_run.md").read_text()
    assert "scripts/setup.sh notebook && .venv/bin/jupyter lab docs/controller.ipynb" in page


@pytest.mark.parametrize("what", ["model directory", "SFT", "`Datum`"])
def test_the_index_leads_to_a_runnable_example_of_(what):
    (row,) = [row for row in (ROOT / "docs" / "README.md").read_text().splitlines() if what in row and "your_" in row]
    file, anchor = re.search(r"\]\((\w+\.md)#([\w-]+)\)", row).groups()
    sections = (ROOT / "docs" / file).read_text().split("\n## ")[1:]
    (text,) = [part for part in sections if part.split("\n")[0].lower().replace(",", "").replace(" ", "-") == anchor]
    assert "```python\n" in text  # which tests/integration/test_examples.py runs


def readme_code(beginning: str) -> dict:
    """What is defined by the README's block that begins so."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if block.startswith(beginning)]
    scope = {}
    exec(code, scope)
    return scope


def test_the_readmes_task_has_splits_that_share_no_task():
    family = readme_code("import random")["Add"].Config().build()
    prompts = {split: [family.task(split, i).prompt for i in range(family.num_tasks(split))] for split in SIZES}
    assert {split: len(of_split) for split, of_split in prompts.items()} == SIZES
    pairs = {frozenset(prompt.rstrip("=").split("+")) for of_split in prompts.values() for prompt in of_split}
    assert len(pairs) == 11325  # 7+5 is the same sum as 5+7
    task = family.task("test", 0)
    a, b = map(int, task.prompt.rstrip("=").split("+"))
    assert family.reward(task, [str(a + b), "x"]) == [1.0, 0.0]


SIZES = {"train": 9000, "validation": 1000, "test": 1325}


def test_the_readmes_loss_is_the_policy_gradient():
    # - (0.5 x 2 x log p_0 + 0.25 x -1 x log p_1): gradients -1 and 0.25.
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tensors = {"token_weights": torch.tensor([0.5, 0.25]), "advantages": torch.tensor([2.0, -1.0])}
    inputs = LossInputs(policy_logprobs=logprobs, datum=torch.zeros(2).long(), num_datums=1, tensors=tensors)
    loss, metrics = readme_code("def reinforce")["reinforce"](inputs)
    loss.backward()
    assert loss.item() == 0.5 and metrics == {} and logprobs.grad.tolist() == [-1.0, 0.25]
