"""The page over runs in headless Chromium, on a run in progress.

Run by `pytest -m slow tests/integration/test_view_browser.py`; wants Chromium, and npm for axe-core.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import psutil
import pytest

from tests.integration.conftest import ROOT
from tests.integration.leftovers import nothing_left
from tests.kit.runs import HOSTILE, branching, completion, made_run, write_evaluation, write_step

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = "axe-core@4.14.1"
TASK = "run=hostile&name=sort&split=validation&id=sort/validation/0"
SERIOUS = ("serious", "critical")
KILLED_WITHIN_S = 5.0

pytestmark = [
    pytest.mark.whole,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


def until(holds, seconds: float, what: str):
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def going_on(tmp_path_factory):
    """The directory of a run in progress, with two generator replicas."""
    path = tmp_path_factory.mktemp("runs") / "live"
    options = (
        "--generator.num-replicas 2 --supervised.num-steps 4 --controller.num-steps 2000 --controller.eval-every 0"
    )
    options += " --controller.eval-tasks 8 --algorithm.tasks-per-step 4 --controller.pass-at-k 0"
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", "configs/quickstart.py", "--output-dir", str(path)]
    with nothing_left(within_s=15), open(path.parent / "run.log", "w") as log:
        process = psutil.Popen([*command, *options.split()], cwd=ROOT, stdout=log, stderr=log)
        try:
            metrics = path / "metrics.jsonl"
            started = lambda: metrics.exists() and '"reinforcement"' in metrics.read_text()  # noqa: E731
            try:
                until(started, 180, "the run has not made a step")
            except AssertionError as error:
                raise AssertionError((path.parent / "run.log").read_text()[-2000:]) from error
            yield path
        finally:
            everyone = [process, *process.children(recursive=True)]
            for one in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(everyone, timeout=20)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The directory of a run with hostile completions."""
    run_dir = made_run(tmp_path_factory.mktemp("runs") / "hostile")
    write_evaluation(run_dir, 1, [completion(0, HOSTILE, 0.0), completion(1, "abc", 1.0)])
    write_step(run_dir, 4, [branching(20)])
    return run_dir.path


@pytest.fixture(scope="module")
def url(going_on, hostile):
    """The page over both runs."""
    command = [sys.executable, "-m", "torchtitan_rl.cli", "view", str(going_on), str(hostile), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"http://[\d.:]+", process.stdout.readline())[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, url):
    """A page that fails the test for a message on the console, a dialog, or a request to another host."""
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    opened, wrong = context.new_page(), []
    opened.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    opened.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith((url, "data:")) else None)
    yield opened
    assert wrong == []
    context.close()


def test_curves_of_a_run_in_progress_move(page):
    page.goto("/curves?run=live&metric=reward/mean")
    page.wait_for_selector("figure[data-points]")
    points = lambda: int(page.get_attribute("figure", "data-points"))  # noqa: E731
    first = points()
    until(
        lambda: points() > first + 2, 40, "the curve stands still"
    )  # wait_for_function evaluates text: forbidden here
    assert page.locator("figure canvas").count() == 1
    assert page.locator(".legend").inner_text().startswith("live ")


def test_a_rollout_of_a_run_in_progress_opens_and_its_tokens_tell_why(page):
    page.goto("/rollouts?run=live")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollout?**", wait_until="load")
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    told = page.locator("#token").inner_text()
    assert "token" in told and "generator" in told and "advantage" in told
    page.click("text=log-prob gap")
    assert "tint=gap" in page.url
    page.keyboard.press("]")
    page.wait_for_url("**tint=gap**")
    page.goto("/groups?run=live")
    page.locator(".groups a").first.click()
    assert page.locator(".side article").count() == 8


def test_search_finds_and_every_state_has_an_address(page):
    page.goto("/rollouts?run=hostile")
    page.keyboard.press("/")
    page.keyboard.type("answer 3 is")
    page.keyboard.press("Enter")
    page.wait_for_selector("#total:has-text('1 of')")
    assert page.locator("tbody tr").count() == 1 and "q=answer+3+is" in page.url
    page.goto(page.url + "&sort=reward")
    assert page.locator("tbody tr").inner_text().split()[0] == "3"


def test_hostile_completions_are_harmless_text(page):
    for address in (
        *("/rollouts?run=hostile", "/group?run=hostile&id=2/0", "/rollout?run=hostile&id=2/0/1"),
        *("/completions?run=hostile", f"/task?{TASK}", f"/completion?{TASK}&step=1"),
    ):
        page.goto(address)
        assert page.evaluate("document.querySelectorAll('main script, main img, main iframe').length") == 0
    page.goto("/text?run=hostile&id=2/0/1")
    said = page.locator(".whole").inner_text()
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in said and "U+202E" in said and "\u202e" not in said


def test_a_rollout_with_branches_is_drawn_and_its_turns_are_a_click_away(page):
    page.goto("/rollout?run=hostile&id=20/0/0")
    tree = page.locator(".tree")
    rows = [row.bounding_box() for row in tree.locator("li").all()]
    dots = [dot.bounding_box() for dot in tree.locator("circle").all()]
    middle = [box["y"] + box["height"] / 2 for box in rows]
    assert middle == pytest.approx([box["y"] + box["height"] / 2 for box in dots], abs=2)  # each beside its turn
    assert dots[0]["x"] == dots[1]["x"] < dots[2]["x"] < dots[3]["x"]
    assert tree.locator("path").count() == 2
    tree.locator("a", has_text="turn 2").click()
    assert page.url.endswith("#turn-2") and page.locator("#turn-2").is_visible()


def test_a_megabyte_of_one_line_does_not_stop_the_browser(page, hostile):
    with open(hostile / "rollouts" / "000002.jsonl", "a") as file:
        record = {"step": 9, "attempt": 1, "rollout_id": "long", "group_id": "long", "text": "x" * 1_000_000}
        file.write(json.dumps(record) + "\n")
    for address in ("/rollouts?run=hostile", "/rollout?run=hostile&id=long", "/text?run=hostile&id=long"):
        began = time.monotonic()
        page.goto(address)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert time.monotonic() - began < 5


def test_two_runs_compare(page):
    page.goto("/curves?metric=reward/mean")
    until(lambda: page.locator(".legend .key").count() == 2, 20, "two runs have no two curves")
    page.goto("/configs")
    assert page.locator("tr:has-text('controller.num_steps')").count() >= 1
    page.click(".runs a:has-text('hostile')")
    assert page.url.endswith("/configs?run=live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page, scheme, tmp_path_factory):
    source = _axe(tmp_path_factory)
    page.emulate_media(color_scheme=scheme)
    found = {}
    for address in (
        *("/", "/curves", "/evaluations", "/rollouts?run=live", "/groups?run=live", "/group?run=hostile&id=2/0"),
        *("/rollout?run=hostile&id=2/0/0", "/rollout?run=hostile&id=2/0/0&tint=ratio", "/text?run=hostile&id=2/0/1"),
        "/rollout?run=hostile&id=20/0/0",
        *("/configs?show=all", "/configs", "/completions?run=live", "/completions?run=hostile"),
        *(f"/task?{TASK}", f"/completion?{TASK}&step=1"),
    ):
        page.goto(address)
        page.wait_for_timeout(300)
        page.evaluate(source)
        for fault in page.evaluate("axe.run()")["violations"]:
            if fault["impact"] in SERIOUS:
                found[address, fault["id"]] = [node["html"][:200] for node in fault["nodes"][:3]]
    assert found == {}


def _axe(tmp_path_factory) -> str:
    if shutil.which("npm") is None:
        pytest.skip("no npm to fetch axe-core")
    directory = tmp_path_factory.getbasetemp() / "axe"
    if not directory.exists():
        directory.mkdir()
        subprocess.run(["npm", "pack", AXE], cwd=directory, check=True, capture_output=True)
        with tarfile.open(next(directory.glob("*.tgz"))) as archive:
            (directory / "axe.js").write_bytes(archive.extractfile("package/axe.min.js").read())
    return (directory / "axe.js").read_text()


def test_a_killed_replica_shows_in_the_health_within_five_seconds(page, going_on):  # last: it changes the run
    page.goto("/?run=live")
    page.wait_for_selector(".replicas .good:has-text('generator-1')")
    assert page.get_attribute(".state", "data-state") == "running"
    pid = int(re.search(r"pid (\d+)", (going_on / "logs" / "generator-1-0.log").read_text())[1])
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    page.wait_for_selector("td b:has-text('replica_lost')", timeout=1000 * KILLED_WITHIN_S)
    print(f"\na killed replica showed after {time.monotonic() - killed:.1f} s")
