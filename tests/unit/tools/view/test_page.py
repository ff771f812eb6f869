"""The page over runs, asked as a browser asks: every address, hostile text, bad input, who may ask."""

import json
import math
import re
import signal
import socket
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest

from tests.kit.runs import HOSTILE, branching, completion, group, made_run, write_evaluation, write_step
from torchtitan_rl.cli import main, verbs
from torchtitan_rl.record import attempts
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.status import Status

pytest.importorskip("duckdb")
from fastapi.testclient import TestClient  # noqa: E402

from torchtitan_rl.tools.view import pages, text, view_verb  # noqa: E402
from torchtitan_rl.tools.view.application import application  # noqa: E402
from torchtitan_rl.tools.view.runs import open_runs  # noqa: E402
from torchtitan_rl.tools.view.turn_tree import TurnTree  # noqa: E402

ADDRESSES = ("/", "/curves", "/evaluations", "/completions", "/configs", "/rollouts", "/groups")
TASK = "name=sort&split=validation&id=sort/validation/1"


def client(*paths) -> TestClient:
    return TestClient(application(open_runs(paths)), base_url="http://127.0.0.1:8765", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    first = made_run(directory / "first")
    write_evaluation(first, 0, [completion(0, "at once", 1.0), completion(1, HOSTILE, 0.0)])
    failed = completion(1, HOSTILE, None, sample=1, failed=HOSTILE)
    write_evaluation(first, 3, [completion(0, "still", 1.0), completion(1, "learnt it", 1.0), failed])
    made_run(directory / "second", steps=2, lr=0.002)
    return directory


@pytest.fixture(scope="module")
def page(runs) -> TestClient:
    return client(runs / "first", runs / "second")


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.said = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.said += data


@pytest.mark.parametrize(
    "address",
    [*ADDRESSES, "/curves?metric=time/step_s&smooth=5", "/configs?show=all", "/rollouts?run=second&q=right&sort=reward"]
    + [
        "/groups?step=1",
        "/group?id=2/0",
        "/pairs",
        "/pairs?run=second&run=first&step=1",
        "/pair?run=first&run=second&id=2/0",
        "/text?id=2/0/1",
        "/text?id=2/0/1&part=text-0",
        "/completions?step=0&name=sort&split=validation&verdict=wrong&q=script",
        f"/task?{TASK}",
        f"/completion?{TASK}&step=0",
        "/api/curves?metric=reward/mean",
    ]
    + [f"/rollout?id=2/0/1&tint={tint}" for tint in text.TINTS],
)
def test_every_address_answers_and_lets_nothing_else_in(page, address):
    answer = page.get(address)
    assert answer.status_code == 200, answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"
    found = Tags(answer.text)
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        assert tag != "img" and (tag != "script" or attributes.get("src", "").startswith("/static/"))
        assert not re.match(r"(https?:)?//|javascript:", attributes.get("href") or attributes.get("src") or "")


@pytest.mark.parametrize(
    "address",
    ["/rollouts", "/group?id=2/0", "/rollout?id=2/0/1", "/text?id=2/0/1", "/rollouts?q=%3Cscript", "/completions"]
    + [f"/task?{TASK}", f"/completion?{TASK}&step=0", f"/completion?{TASK}&step=3&sample=1"]
    + ["/pair?run=first&run=second&id=2/0"],
)
def test_what_a_model_said_is_text(page, address):
    answer = page.get(address)
    assert not set(answer.text) & set("\x1b\x00\u202e\u202c\u2066")
    if address != "/rollout?id=2/0/1":  # which shows the tokens
        assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in Tags(answer.text).said
        assert "U+202E RIGHT-TO-LEFT OVERRIDE" in answer.text


@pytest.mark.parametrize("address", ["/rollouts", "/completions"])
def test_a_page_past_the_last_one_says_so_and_not_that_nothing_fits(page, address):
    assert "This page of the list is empty." in Tags(page.get(f"{address}?page=99").text).said
    assert " fits." in Tags(page.get(f"{address}?page=99&q=no+such+text").text).said


def test_names_within_attributes_are_without_tags(tmp_path):
    run_dir = made_run(tmp_path / "a\u202eb", steps=1)
    write_evaluation(run_dir, 0, [completion(0, "at once", 1.0)])
    event = {"at": "2026-01-01T00:00:00+00:00", "level": "warning", "kind": "k", "who": "x", "text": "t"}
    run_dir.record("events", 1, [event])
    with run_dir.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 1, "phase": "reinforcement", "odd/\u202ename": 1.0}) + "\n")
    page = client(run_dir.path)
    for address, params, label in (
        ("/", {}, "Events of aU+202Eb"),
        ("/evaluations", {}, "Evaluations of aU+202Eb"),
        ("/curves", {"metric": "odd/\u202ename"}, "odd/U+202Ename over steps"),
    ):
        tags = Tags(page.get(address, params=params).text).tags
        assert label in [attributes.get("aria-label") for _, attributes in tags], address


def test_the_same_draws_of_two_runs_stand_side_by_side(tmp_path):
    texts = {"first": ["abcd", "same", "right"], "second": ["abxy", "same", "wrong"]}
    for name, rewards in (("first", [0.25, 0.5, 1.0]), ("second", [0.25, 0.5, 0.0])):
        run_dir = made_run(tmp_path / name, steps=0)
        other = group(9, ["alone"], [1.0])
        write_step(run_dir, 1, [group(4, texts[name], rewards), *([other] if name == "first" else [])])
    page = client(tmp_path / "first", tmp_path / "second")
    assert "/pairs?run=first&amp;run=second&amp;step=1" in page.get("/groups?run=first&step=1").text
    assert "/pair?run=first&amp;run=second&amp;id=4%2F0&amp;step=1" in page.get("/group?run=first&id=4/0").text
    listed = page.get("/pairs").text
    words = " ".join(Tags(listed.replace("</td>", " </td>")).said.split())
    assert "Draws in both runs: 1. Rollouts: 3, with another reward: 1." in words
    assert "4/0 sort/train/4 0.583 0.250 \u22120.333 1 of 3" in words
    pair = page.get("/pair?id=4/0").text
    assert '<span class="muted">ab</span><mark>cd</mark>' in pair and "<mark>xy</mark>" in pair
    assert pair.count("<mark>") == 4 and '<span class="muted">same</span>' in pair


def test_draws_are_compared_between_two_runs_that_have_them(page, runs):
    alone = client(runs / "first").get("/pairs")
    assert alone.status_code == 400 and "draws are compared between two runs; show two" in alone.text
    missing = page.get("/pair?id=77/0")
    assert missing.status_code == 404 and "is not recorded in first at that step" in missing.text
    assert "No draw is recorded in both runs" in page.get("/pairs?step=99").text


def test_completions_of_an_evaluation_are_listed_with_the_wrong_ones_first(page):
    answer = page.get("/evaluations?run=first").text
    assert answer.count("1 wrong of 2") == 1
    (link,) = [a["href"] for tag, a in Tags(answer).tags if tag == "a" and a["href"].startswith("/completions?")]
    listed = page.get(link).text
    assert "2 of first, wrong ones first" in listed and listed.index("question 1") < listed.index("question 0")
    assert "at once" in page.get("/completions?verdict=right").text
    assert "at once" not in page.get("/completions?verdict=wrong").text
    assert "at once" not in page.get("/completions?q=LEARNT").text
    assert "record.eval_completions is 0" in page.get("/completions?run=second").text
    assert "No completion fits" in page.get("/completions?split=test").text


def test_one_task_is_shown_over_steps(page):
    links = [a["href"] for tag, a in Tags(page.get("/completions").text).tags if tag == "a" and "/task?" in a["href"]]
    answer = Tags(page.get(links[0]).text)
    assert [a["id"] for tag, a in answer.tags if tag == "h2" and "id" in a] == ["step-0", "step-3"]
    words = " ".join(answer.said.split())
    first, second = words.index("greedy · wrong · reward 0.000"), words.index("greedy · right · reward 1.000")
    assert first < second < words.index("sample 1 · failed · reward –") and "learnt it" in words
    assert "question 1" in words and "abc" in words and "at once" not in words


def test_the_time_left_counts_the_optimizer_steps_of_a_batch(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    attempts.begin(run_dir, None)
    run_dir.write_config({"name": "run"})
    for step in range(4, 84, 4):
        line = {"step": step, "phase": "reinforcement", "time/step_s": 10.0, "optim/num_steps": 4}
        run_dir.log_metrics(line)
    recorder = Recorder([status := Status(run_dir, [])])
    with recorder.span("reinforcement", total=400, done=80):
        status.beat()
        said = " ".join(Tags(client(run_dir.path).get("/").text).said.split())
    assert "step 80 of 400, about 13 min left" in said


def test_a_long_completion_is_whole_on_a_page_of_its_own(tmp_path):
    run_dir = made_run(tmp_path / "run")
    write_evaluation(run_dir, 1, [completion(0, "x" * 100_000 + "end", 0.0)])
    page, task = client(run_dir.path), "name=sort&split=validation&id=sort/validation/0"
    answer = page.get(f"/task?{task}").text
    assert len(answer) < 20_000 and "/completion?run=run&amp;name=sort" in answer
    whole = page.get(f"/completion?{task}&step=1").text
    assert "100\u202f003 characters" in whole and "xend</div>" in whole


def test_text_without_seen_characters_is_marked():
    assert str(text.visible("a<b>\u200bc\td\n")) == (
        'a&lt;b&gt;<span class="unseen" title="U+200B ZERO WIDTH SPACE">U+200B</span>c\td\n'
    )
    assert "\u2400" in text.visible("\x00") and text.visible(None) == "" and "U+D800" in text.visible("\ud800")


def test_a_megabyte_of_one_line_is_cut_and_shown_whole_on_request(tmp_path):
    run_dir = made_run(tmp_path / "run", steps=1)
    write_step(run_dir, 2, [group(9, ["x" * 1_000_000 + "end", "b"], [1.0, 0.0])])
    page = client(run_dir.path)
    assert len(page.get("/rollouts").text) < 100_000 and len(page.get("/group?id=9/0").text) < 100_000
    whole = page.get("/text?id=9/0/0")
    assert "1\u202f000\u202f003 characters" in whole.text and whole.text.count('class="chunk"') == 126


def test_a_rollout_says_why_its_tokens_were_pushed(page):
    found = page.get("/rollout?id=2/0/0").text
    tokens = re.findall(r'<span class="(t [^"]*|t)" title="(token[^"]*)"', found)
    assert [classes for classes, _ in tokens] == ["t p3", "t p3 clipped", "t p3"]
    assert "gap −0.1000" in tokens[0][1] and "ratio 1.6487" in tokens[1][1] and "version 6" in tokens[2][1]
    assert found.count('class="version"') == 2 and "clip at 0.80 and 1.20" in found
    assert "exact" in found and "turn 1: environment 0.100 s" in found and "/rollout?id=2%2F0%2F1" in found
    assert (
        "t n3" in page.get("/rollout?id=2/0/0&tint=gap").text
        and "t p5" in page.get("/rollout?id=2/0/0&tint=ratio").text
    )
    assert "zero_variance left the rollout out" in page.get("/rollout?id=3/0/0").text


def test_two_runs_compare(page):
    told = Tags(page.get("/configs").text).said
    assert "trainer.optimizer.lr" in told and "0.001" in told and "0.002" in told and "group_size" not in told
    data = page.get("/api/curves?metric=reward/mean&metric=eval/accuracy&metric=nothing").json()
    first, second = data["charts"][0]["lines"]
    assert (first["name"], first["steps"], second["name"], second["steps"]) == ("first", [1, 2, 3], "second", [1, 2])
    assert data["charts"][1]["lines"][0]["name"] == "first validation" and data["charts"][2]["lines"] == []
    assert page.get(f"/api/curves?metric=reward/mean&have={data['state']}").json() == {"state": data["state"]}
    assert "0.250" in page.get("/evaluations?run=first").text


def test_curves_have_axes_a_scale_the_warm_start_and_a_table(page, runs):
    answer = Tags(page.get("/curves?metric=time/step_s&metric=reward/mean&scale=log").text)
    figures = {a["data-metric"]: a for tag, a in answer.tags if tag == "figure" and "data-metric" in a}
    assert figures["time/step_s"]["data-unit"] == "seconds" and figures["reward/mean"]["data-steps"] == "step"
    assert next(a for tag, a in answer.tags if a.get("id") == "charts")["data-scale"] == "log"
    assert page.get("/curves?scale=cubic").status_code == 400
    (link,) = [a["href"] for tag, a in answer.tags if tag == "a" and "download" in a]
    table = page.get(link)
    assert table.headers["content-type"].startswith("text/csv")
    rows = table.text.splitlines()
    assert rows[0] == "run,metric,of,step,value" and "first,time/step_s,,1,1.0" in rows and len(rows) == 1 + 2 * 5
    assert "first,eval/accuracy,validation,0,0.25" in page.get("/curves.csv").text.splitlines()


def test_the_warm_starts_loss_is_shown_unless_others_are_asked_for(tmp_path):
    run_dir = made_run(tmp_path / "run")
    run_dir.log_metrics({"step": 1, "phase": "supervised", "loss/mean": 2.0})
    figures = [a for tag, a in Tags(client(run_dir.path).get("/curves").text).tags if tag == "figure"]
    (loss,) = [a for a in figures if a.get("data-metric") == "supervised: loss/mean"]
    assert loss["data-steps"] == "step of the warm start" and loss["data-unit"] == "loss per token"


def test_histograms_of_the_newest_rollouts_are_drawn(page):
    answer = page.get("/curves?run=first").text
    pictures = re.findall(r'<svg class="bars c0".*?</svg>', answer, re.DOTALL)
    rewards = pictures[0]
    assert "reward of first: 12 rollouts from 0 to 1.000" in rewards.replace("0.000", "0")
    # Of 3 steps: 3 rewards of 0, 6 of 0.5, 3 of 1.
    assert re.findall(r'x="([\d.]+)".*?height="([\d.]+)"/>', rewards) == [
        ("0.5", "29.0"),
        ("120.5", "58.0"),
        ("230.5", "29.0"),
    ]
    assert "at most <b>6</b> in a bin" in answer and len(pictures) == 3


@pytest.mark.parametrize(
    "rewards, bars",
    [
        ([1.0, 1.0], [(0, 32), (0, 32)]),
        ([0.0, 0.0], [(30, 2), (30, 2)]),
        ([1.0, -1.0, 0.0], [(0, 16), (16, 16), (16, 2)]),
        ([1e300, None], [(0, 32), (30, 2)]),
    ],
)
def test_a_bar_stands_on_nought_so_that_equal_rewards_are_seen(tmp_path, rewards, bars):
    run_dir = RunDir.create(tmp_path / "run")
    records = [{"rollout_id": str(i), "group_id": "g", "reward": reward} for i, reward in enumerate(rewards)]
    run_dir.record("rollouts", 1, records)
    drawn = re.findall(
        r'<rect [^>]*y="([\d.]+)" width="10" height="([\d.]+)"', client(run_dir.path).get("/groups").text
    )
    assert [(float(y), float(height)) for y, height in drawn] == bars


def test_curves_move_while_a_run_goes_on(tmp_path):
    run_dir = made_run(tmp_path / "run")
    page = client(run_dir.path)
    before = page.get("/api/curves?metric=reward/mean").json()
    write_step(run_dir, 4, [group(8, ["a"], [1.0])])
    after = page.get(f"/api/curves?metric=reward/mean&have={before['state']}").json()
    assert after["charts"][0]["lines"][0]["steps"] == [1, 2, 3, 4]
    assert "8/0/0" in page.get("/rollouts").text


def test_curves_of_two_thousand_metrics_take_less_than_a_second(tmp_path):
    run_dir = made_run(tmp_path / "run", steps=1)
    names = [f"reward/part_{i}_mean" for i in range(2001)]
    with open(run_dir.metrics_file, "a") as file:
        for step in range(2, 202):
            line = {"step": step, "phase": "reinforcement"} | dict.fromkeys(names, step / 2)
            file.write(json.dumps(line) + "\n")
    page, query = client(run_dir.path), "&".join(f"metric={name}" for name in names)
    page.get("/curves")  # reads the file, once
    began = time.process_time()
    assert page.get(f"/curves?{query}").text.count('<figure class="chart" data-metric') == 2001
    in_sight = page.get(f"/api/curves?smooth=100&{'&'.join(f'metric={name}' for name in names[:64])}").json()
    seconds = time.process_time() - began
    assert len(in_sight["charts"]) == 64 and seconds < 1, seconds
    refused = page.get(f"/api/curves?{query}")
    assert refused.status_code == 400 and "metric: 2001 are asked for, and 64 may be" in refused.text


def test_a_mean_over_many_steps_takes_as_long_as_one_over_few():
    values = [float(i % 7) for i in range(100_000)] + [math.inf, math.nan, 3.0]
    began = time.process_time()
    smooth = pages._smoothed(values, 100)
    assert time.process_time() - began < 0.5
    assert smooth[0] == 0.0 and smooth[6] == 3.0
    assert smooth[5000] == pytest.approx(sum(values[4901:5001]) / 100)
    assert smooth[-1] == pytest.approx((sum(values[-100:-3]) + 3.0) / 98)
    assert math.isnan(pages._smoothed([math.nan, 1.0], 5)[0]) and pages._smoothed([math.nan, 1.0], 5)[1] == 1.0


@pytest.mark.parametrize(
    "address, status, said",
    [
        ("/rollouts?run=nope", 400, "run='nope': is not shown here"),
        ("/rollouts?reward_min=much", 400, "reward_min='much': is no number"),
        ("/rollouts?step_min=1e99", 400, "whole number"),
        ("/rollouts?sort=text", 400, "sort='text'"),
        ("/rollout?id=<b>", 404, "rollout='<b>': is not recorded"),
        ("/completions?verdict=good", 400, "verdict='good'"),
        ("/task?id=<b>", 404, "task='<b>': no completion"),
        (f"/completion?{TASK}&step=2", 404, "sample 0 at step 2 is not recorded in first"),
        ("/group?id=77/0", 404, "is not recorded in first"),
        ("/text?id=2/0/0&part=text-9", 404, "has 2 turns"),
        ("/nope", 404, "there is no such page"),
        ("/static/../app.py", 404, "there is no such page"),
        ("/docs", 404, "there is no such page"),
    ],
)
def test_what_is_wrong_with_an_address_is_a_sentence(page, address, status, said):
    answer = page.get(address)
    assert answer.status_code == status and said in Tags(answer.text).said and "<b>:" not in answer.text


def test_only_this_machine_asks_and_nobody_writes(page):
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost:8765:80", ""):
        assert page.get("/", headers={"host": host}).status_code == 421
    assert page.get("/", headers={"host": "localhost:9"}).status_code == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert page.request(method, "/").status_code == 405
    assert page.head("/static/style.css").status_code in (200, 405)


def test_the_page_leaves_no_trace_in_a_run(tmp_path):
    run_dir = made_run(tmp_path / "run")
    before, page = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}, client(run_dir.path)
    for address in ADDRESSES:
        page.get(address)
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")} == before


def test_any_directory_opens_with_what_is_there(tmp_path):
    (tmp_path / "empty").mkdir()
    broken = made_run(tmp_path / "broken").path
    (broken / "config.json").write_text('{"name": ')
    (broken / "metrics.jsonl").write_text('{"step": 1, "phase"')
    (broken / "status.json").write_text("{}")
    (broken / "rollouts" / "000001.parquet").write_bytes(b"PAR1")
    newer = made_run(tmp_path / "newer").path
    record = {
        "step": 9,
        "attempt": "one",
        "rollout_id": "n/0",
        "novel": {"a": [1]},
        "turns": [{"tokens": [1], "new": 2}],
    }
    with open(newer / "rollouts" / "000002.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")
    page = client(tmp_path / "empty", broken, newer)
    for address in ADDRESSES:
        for name in ("empty", "broken", "newer"):
            answer = page.get(address, params={"run": name})
            assert answer.status_code == 200, (address, name, answer.text)
    empty = Tags(page.get("/?run=empty").text).said
    assert "there is no run yet" in empty and "nothing is known" in empty.lower()
    assert "config.json is missing" in page.get("/?run=broken").text
    assert "config.json: is cut off" in Tags(page.get("/?run=broken").text).said
    for name in ("empty", "broken", "newer"):
        assert "nothing wrong" not in page.get(f"/?run={name}").text
    assert "No rollouts are recorded" in page.get("/rollouts?run=empty").text
    assert "000001.parquet: cannot be read" in page.get("/rollouts?run=broken").text
    found = page.get("/rollout?run=newer&id=n/0")
    assert found.status_code == 200 and "novel" in found.text


def test_the_page_opens_before_its_run_and_shows_it_when_it_begins(tmp_path):
    path = tmp_path / "runs" / "first"
    page = client(path)
    for address in ADDRESSES:
        assert page.get(address).status_code == 200, address
    told = Tags(page.get("/").text)
    assert ("p", {"class": "state odd", "data-state": "waiting"}) in told.tags
    assert "there is no run yet; this page shows it when it begins" in told.said
    made_run(path)
    assert "reward/mean" in Tags(page.get("/").text).said and "2/0/0" in page.get("/rollouts").text
    assert "2/0" in page.get("/groups?step=1").text
    (chart,) = page.get("/api/curves?metric=reward/mean").json()["charts"]
    assert chart["lines"][0]["steps"] == [1, 2, 3]


def test_the_verb_waits_for_a_run_and_names_one_that_is_meant_perhaps(runs, tmp_path):
    """The command itself, on a path that is not there."""
    command = [sys.executable, "-m", "torchtitan_rl.cli", "view", str(runs / "frist"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("frist: http://127.0.0.1:")
            assert process.stdout.readline() == (
                f"{runs / 'frist'}: is not there yet (did you mean {runs / 'first'}?); the page shows the run when it "
                "begins\n"
            )
        finally:
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(20) == 130
            finally:
                process.kill()  # where the tests were started with SIGINT ignored, as a shell does in the background


def test_health_has_the_newest_accuracy_why_a_run_ended_and_what_was_not_looked_at(tmp_path):
    run_dir = made_run(tmp_path / "run")
    newest = {"eval/name": "sort", "eval/split": "validation", "eval/accuracy": 0.75}
    run_dir.log_metrics({"step": 3, "phase": "evaluation", **newest})
    status = {"at": "2026-11-20T12:00:00+00:00", "attempt": 1, "ended": "stopped", "spans": [], "replicas": {}}
    (run_dir.path / "status.json").write_text(json.dumps(status))
    event = {"at": "2026-11-20T12:00:00+00:00", "level": "error", "kind": "run_failed", "who": "", "text": "no <space>"}
    run_dir.record("events", 3, [event])
    answer = client(run_dir.path).get("/").text
    assert "<dt>accuracy, validation, step 3</dt><dd>0.750</dd>" in answer
    told = " ".join(Tags(answer).said.split())
    assert "ago: no <space>" in told
    assert "Not looked at" in told and "rule truncation: needs `completion/truncated_frac` of 5 batches" in told


def test_a_run_without_tokens_shows_its_texts(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.record("rollouts", 1, [{"rollout_id": "a", "group_id": "g", "text": "said", "prompt": "asked"}])
    answer = client(run_dir.path).get("/rollout?id=a")
    assert answer.status_code == 200 and "record_tokens is off" in answer.text and "said" in Tags(answer.text).said


def test_runs_of_one_name_are_told_apart(tmp_path):
    for parent in ("a", "b"):
        RunDir.create(tmp_path / parent / "run")
    names = [run.name for run in open_runs([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "a" / "run"])]
    assert names == ["a/run", "b/run"]
    (tmp_path / "c").touch()
    with pytest.raises(ValueError, match="is no directory"):
        open_runs([tmp_path / "c"])


async def test_a_port_in_use_picks_the_next_one(runs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def taken_port() -> int:
            listening = await view_verb._listening(application(open_runs([runs / "first"])), port)
            await listening.close()
            return listening.port

        assert port < await taken_port() < port + 20


@pytest.mark.parametrize("port", ["-5", "65536"])
def test_a_number_that_is_no_port_is_refused(port, runs, capsys):
    assert main.main(["view", str(runs / "first"), "--port", port]) == 1
    assert f"--port={port}: must be from 0, which takes a free one, to 65535" in capsys.readouterr().err


async def test_the_next_ports_end_with_the_last_one(runs, monkeypatch):
    tried = []

    class Taken:
        def __init__(self, app, host, port):
            tried.append(port)

        async def __aenter__(self):
            raise ValueError("in use")

    monkeypatch.setattr("torchtitan_rl.serve.listening.Listening", Taken)
    with pytest.raises(ValueError, match="--port=65534: none from 65534 to 65535 is free"):
        await view_verb._listening(application(open_runs([runs / "first"])), 65534)
    assert tried == [65534, 65535]


def test_the_verb_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    assert "view" in verbs.VERBS
    (tmp_path / "file").touch()
    assert main.main(["view", str(tmp_path / "file")]) == 1
    assert "is no directory" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "torchtitan_rl.tools.view.application", None)

    def without(name, *args, **kwargs):
        if name == "torchtitan_rl.tools.view.application":
            raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")
        return imported(name, *args, **kwargs)

    imported = __import__
    monkeypatch.setattr("builtins.__import__", without)
    assert main.main(["view", str(tmp_path)]) == 1
    assert "run scripts/setup.sh" in capsys.readouterr().err


def test_a_rollout_with_branches_is_drawn_as_a_tree(tmp_path):
    run_dir = made_run(tmp_path / "run", steps=1)
    write_step(run_dir, 2, [branching(4)])
    html = client(run_dir.path).get("/rollout", params={"id": "4/0/0"}).text
    assert "3 branches of 4 turns" in html
    assert re.findall(r'<path d="([^"]*)"', html) == ["M8 12V24L8 36", "M8 12V48L22 60"]
    circles = re.findall(r'<circle cx="(\d+)" cy="(\d+)" r="4" class="([^"]*)"', html)
    assert circles == [("8", "12", "high"), ("8", "36", " untrained"), ("22", "60", "high"), ("36", "84", " untrained")]
    rows = re.findall(r'<li><a href="#turn-(\d)">turn \d</a>(.*?)</li>', html)
    assert [("not trained" in row, "0.500" in row) for _, row in rows] == [(False, True), (True, False)] * 2
    assert 'goes on from <a href="#turn-0">turn 0</a>' in html and html.count("<h3>Observation</h3>") == 2


def test_records_of_versions_that_do_not_say_what_a_turn_goes_on_from_have_no_tree():
    assert TurnTree.of({"turns": [{"tokens": [1]}, {"tokens": [2]}]}) is None
    assert TurnTree.of({"turns": []}) is None


def test_a_long_tree_is_drawn_in_part():
    tree = TurnTree.of({"turns": [{"extends": None if i == 0 else i - 1, "tokens": [1]} for i in range(1000)]})
    assert (tree.num_turns, tree.num_branches, len(tree.nodes), tree.width) == (1000, 1, 300, 16)
