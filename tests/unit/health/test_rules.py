"""Each rule speaks of its fault, and says nothing just below its threshold."""

import math
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.health.facts import RunFacts
from torchtitan_rl.health.rules.table import RULES, check_thresholds, look
from torchtitan_rl.health.siblings import compares_siblings, recorded_compares_siblings
from torchtitan_rl.health.whereabouts import Whereabouts
from torchtitan_rl.train.intervals import score_interval

ROOT = Path(__file__).parents[3]
FLOAT32 = {"generator": {"dtype": "float32"}, "trainer": {"training": {"mixed_precision_param": "float32"}}}
LAG = {"algorithm": {"max_policy_lag": 2}}


def steps(*, number=20, **series):
    """Lines of batches; a value is a number, a list of one per batch, or a function of the step. `__` stands for a
    slash in a name."""
    lines = []
    for step in range(1, number + 1):
        line = {"step": step, "phase": "reinforcement"}
        for name, value in series.items():
            value = value(step) if callable(value) else value[step - 1] if isinstance(value, list) else value
            line[name.replace("__", "/")] = value
        lines.append(line)
    return lines


def evaluated(step, accuracy, around=0.04, name="sort", split="validation"):
    ends = {"eval/accuracy_ci95_low": accuracy - around, "eval/accuracy_ci95_high": accuracy + around}
    what = {"step": step, "phase": "evaluation", "eval/name": name, "eval/split": split}
    return {**what, "eval/accuracy": accuracy, **ends}


def found(lines=(), settings=None, rollouts=(), samples=(), thresholds=None, **facts):
    facts = RunFacts(
        lines=lines, settings=settings, rollouts=lambda: list(rollouts), samples=lambda: list(samples), **facts
    )
    findings = look(facts, thresholds or {})
    assert facts.missing == []
    for finding in findings:
        assert finding.what and finding.advice and finding.evidence
    return {finding.rule: finding for finding in findings}


def by_metrics(rule, above, below, settings=None, names=None):
    """The rule alone speaks of the lines `above`, and nothing speaks of those `below`."""
    assert found(above, settings).keys() == {rule, *(names or ())}
    assert found(below, settings) == {}
    return found(above, settings)[rule]


def where(state="running", **more):
    return Whereabouts(**{"state": state, "pid": 1, "host": "here", "ended": "", "written": 1000.0} | more)


# Liveness.


def test_a_dead_replica():
    lost = {"kind": "replica_lost", "who": "generator-1", "step": 7, "text": "its process died", "attempt": 1}
    finding = found(events=[lost])["dead_replica"]
    assert "generator-1" in finding.what and finding.evidence[0] == ("generator-1", 7, "its process died")
    assert found(events=[lost], thresholds={"dead_replica": 2}) == {}
    lines = steps(generator__healthy_replicas=[2] * 10 + [1] * 10)
    assert found(lines, {"generator": {"num_replicas": 2}})["dead_replica"].evidence[0].step == 11
    assert found(steps(generator__healthy_replicas=2), {"generator": {"num_replicas": 2}}) == {}
    left = [{"kind": "replica_left", "who": f"generator-{i}", "step": 7, "text": "left", "attempt": 1} for i in (1, 2)]
    lines = steps(generator__healthy_replicas=[3] * 10 + [1] * 10)
    assert found(lines, {"generator": {"num_replicas": 3}}, events=left) == {}  # they were asked to leave
    assert "dead_replica" in found(lines, {"generator": {"num_replicas": 3}}, events=left[:1])


def test_an_attempt_with_another_number_of_replicas_has_lost_none():
    four = {"generator": {"num_replicas": 4}}
    assert found(steps(generator__healthy_replicas=[2] * 10 + [4] * 10), four, begun=[0, 10]) == {}
    assert found(steps(generator__healthy_replicas=[4] * 10 + [2] * 10), four, begun=[0, 10]) == {}
    lines = steps(generator__healthy_replicas=[2] * 5 + [0] * 5 + [4] * 10)
    finding = found(lines, four, begun=[0, 10])["dead_replica"]
    assert "losses in all: 2" in finding.what and finding.evidence[0].step == 6


@pytest.mark.parametrize("seconds, speaks", [(0.26, True), (0.24, False)])
def test_a_slow_replica(seconds, speaks):
    samples = [
        {"who": who, "in_flight_s": each * 40 * i, "answered": 40 * i, "step": i, "attempt": 1}
        for i in range(5)
        for who, each in (("generator-0", 0.1), ("generator-1", seconds), ("generator-2", 0.1))
    ]
    findings = found(samples=samples)
    assert ("slow_replica" in findings) is speaks
    assert not speaks or findings["slow_replica"].what.startswith("generator-1: takes 0.26 s")


def test_a_replica_that_answers_nothing_is_slow():
    ends = [("generator-0", 10.0, 100), ("generator-1", 300.0, 0)]
    samples = [
        {"who": who, "in_flight_s": spent * i, "answered": answered * i, "step": 1, "attempt": 1}
        for who, spent, answered in ends
        for i in range(2)
    ]
    assert "slow_replica" in found(samples=samples)


def counted(*replicas, attempt=1):
    """Samples at equal times: of each replica the requests in flight summed over seconds, and those answered."""
    return [
        {"who": f"generator-{i}", "in_flight_s": seconds, "answered": answered, "step": 1, "attempt": attempt}
        for i, (spent, done) in enumerate(replicas)
        for seconds, answered in zip(spent, done, strict=True)
    ]


def test_replicas_that_begin_alike_are_alike():
    """One has just answered as many requests as a judgement takes, the other one fewer; some have hardly begun."""
    assert found(samples=counted(([0, 640], [0, 12]), ([0, 640], [0, 11]))) == {}
    assert found(samples=counted(([0, 1], [0, 0]), ([0, 5], [0, 1]))) == {}
    assert "slow_replica" in found(samples=counted(([0, 640], [0, 120]), ([0, 640], [0, 11])))


def test_an_attempt_counts_its_requests_anew():
    before, now = counted(([0, 100], [0, 1000]), ([0, 100], [0, 1000])), ([0, 10], [0, 100])
    assert found(samples=[*before, *counted(now, now, attempt=2)]) == {}
    slow = counted(now, ([0, 30], [0, 100]), attempt=2)
    assert "takes 0.3 s" in found(samples=[*before, *slow])["slow_replica"].what


@pytest.mark.parametrize("part, who", [("time__reward_s", "the rewards"), ("time__generate_s", "the generators")])
def test_an_idle_trainer(part, who):
    busy = {"time__step_s": 10.0, "time__optim_s": 0.1, part: 9.0}
    if part == "time__reward_s":
        busy["time__generate_s"] = 9.1
    above, below = steps(time__forward_backward_s=0.85, **busy), steps(time__forward_backward_s=0.95, **busy)
    assert f"most of it for {who}" in by_metrics("idle_trainer", above, below).what
    told = steps(trainer__idle_frac=0.95, time__forward_backward_s=5.0, **busy)
    assert "95%" in found(told, LAG)["idle_trainer"].what  # trainers are timed where generation overlaps


def test_a_stall():
    lines, status = steps(time__step_s=5.0), {"spans": [{"name": "step"}, {"name": "generate"}]}
    finding = found(lines, whereabouts=where(), now=1101.0, status=status)["stall"]
    assert "101 s" in finding.what and "step > generate" in finding.what and finding.evidence[0].step == 20
    assert found(lines, whereabouts=where(), now=1099.0) == {}
    assert found(steps(time__step_s=0.5), whereabouts=where(), now=1059.0) == {}  # short steps: a minute at least
    assert found(whereabouts=where(), now=1299.0) == {}  # it starts
    begins = found(whereabouts=where(), now=1301.0)["stall"].what
    assert begins == "nothing was written for 301 s; what it waits for is not recorded"
    status = {"spans": [{"name": "starting trainer, generators and store"}]}
    assert found(lines, whereabouts=where(), now=1299.0, status=status) == {}  # again, by a restart
    assert "usually" not in found(lines, whereabouts=where(), now=1301.0, status=status)["stall"].what


def test_an_evaluation_may_take_longer_than_a_step():
    lines, status = steps(time__step_s=1.0), {"spans": [{"name": "step"}, {"name": "evaluating on validation tasks"}]}
    assert found(lines, whereabouts=where(), now=1299.0, status=status) == {}  # its first one
    lines += [evaluated(20, 0.5) | {"time/step_s": 30.0}]
    assert found(lines, whereabouts=where(), now=1599.0, status=status) == {}
    finding = found(lines, whereabouts=where(), now=1601.0, status=status)["stall"]
    assert "601 s, an evaluation usually takes 30 s; " in finding.what


def test_work_that_is_overdue():
    def at_work(seconds, name="generate", **more):
        since = datetime.fromtimestamp(1000.0 - seconds, UTC).isoformat()
        spans = [{"name": "reinforcement", "since": since, "total": 40}, {"name": name, "since": since, "total": 0}]
        reported = datetime.fromtimestamp(999.0, UTC).isoformat()
        status = {"at": reported, "step": 20, "spans": spans, **more}
        return found(steps(time__generate_s=4.0), whereabouts=where(), now=1000.0, status=status)

    finding = at_work(21.0)["overdue"]
    assert finding.what == "generate has taken 21 s so far; usually 4.0 s" and finding.evidence[0].step == 20
    assert at_work(19.0) == {}  # less than five times as long
    assert at_work(21.0, ended="stopped") == {} and at_work(21.0, name="export") == {}  # nobody knows how long it takes
    assert at_work(121.0, name="starting actors")["overdue"].what == "starting actors has taken 2 min so far"
    assert at_work(21.0, at=datetime.fromtimestamp(1.0, UTC).isoformat(), spans=[7]) == {}


def test_the_first_step_of_a_phase_is_compared_with_no_step_of_another():
    since = datetime.fromtimestamp(900.0, UTC).isoformat()
    reported = datetime.fromtimestamp(999.0, UTC).isoformat()
    spans = [{"name": "reinforcement", "since": since, "total": 40}, {"name": "step", "since": since, "total": 0}]
    warm_start = [line | {"phase": "supervised"} for line in steps(time__step_s=0.1)]
    now = {"whereabouts": where(written=900.0), "now": 1000.0, "status": {"at": reported, "spans": spans}}
    assert found(warm_start, **now) == {}
    assert found([*warm_start, *steps(number=1, time__step_s=1.0)], **now).keys() == {"overdue", "stall"}
    spans[0]["name"] = "supervised"
    assert found(warm_start, **now).keys() == {"overdue", "stall"}


def test_a_publication_that_waits_for_an_evaluation_is_not_overdue():
    def waiting(seconds):
        begun = [1000.0 - 45.0 - seconds, 1000.0 - 45.0 - seconds, 1000.0 - 45.0]
        names = ("step", "sync", "wait for the evaluation")
        spans = [
            {"name": name, "since": datetime.fromtimestamp(at, UTC).isoformat(), "total": 0}
            for name, at in zip(names, begun, strict=True)
        ]
        status = {"at": datetime.fromtimestamp(999.0, UTC).isoformat(), "spans": spans}
        lines = steps(time__step_s=9.0, time__sync_s=0.5)
        return found(lines, whereabouts=where(), now=1000.0, status=status)

    assert waiting(1.0) == {} and waiting(11.0)["overdue"].what.startswith("sync has taken 11 s")


def test_a_run_on_another_host_that_reports_is_not_gone():
    reported = datetime.fromtimestamp(2000.0, UTC).isoformat()
    lines, elsewhere = steps(number=12), where("elsewhere")
    assert found(lines, whereabouts=elsewhere, now=2010.0, status={"at": reported}) == {}
    assert "gone" in found(lines, whereabouts=elsewhere, now=2601.0, status={"at": reported})


def test_a_run_that_is_gone():
    lines, settings = steps(number=12), {"controller": {"num_steps": 40}}
    assert "step 12 of 40: it left no reason" in found(lines, settings, whereabouts=where("gone"))["gone"].what
    failed = {"kind": "run_failed", "attempt": 1, "text": "task=7: the reward raised"}
    assert "the reward raised" in found(lines, whereabouts=where("gone"), events=[failed])["gone"].what
    assert "diverged" in found(lines, whereabouts=where("gone", ended="diverged"))["gone"].what
    assert (
        found(lines, whereabouts=where("gone"), events=[{"kind": "preempted", "attempt": 1, "text": "SIGTERM"}]) == {}
    )
    test = {"step": 40, "phase": "evaluation", "eval/split": "test", "eval/accuracy": 1.0}
    assert found([*lines, test], whereabouts=where("gone")) == {}
    writing = {"ended": ""}  # its last checkpoint, while it was evaluated on test tasks
    assert "it left no reason" in found([*lines, test], whereabouts=where("gone"), status=writing)["gone"].what
    assert found(lines, whereabouts=where("gone"), status={"ended": "finished"}) == {}
    full = {"kind": "run_failed", "attempt": 1, "text": "the checkpoint is not on disk"}
    assert "not on disk" in found([*lines, test], whereabouts=where("gone"), events=[full])["gone"].what
    other = evaluated(12, 0.5, name="hard", split="test")
    hard = {"controller": {"eval_sets": {"hard": {}}, "num_steps": 40}}
    assert "gone" in found([*lines, other], hard, whereabouts=where("gone"))
    assert found(lines, whereabouts=where("elsewhere"), now=1599.0) == {}
    assert "gone" in found(lines, whereabouts=where("elsewhere"), now=1601.0)


def test_a_run_that_is_gone_ended_in_a_phase_of_its_own_number_of_steps():
    settings = {"supervised": {"num_steps": 400}, "preference": {"num_steps": 50}, "controller": {"num_steps": 160}}
    lines = [line | {"phase": "supervised"} for line in steps(number=300)]
    after = [{"step": 300, "phase": "checkpoint", "checkpoint/name": "supervised-300"}, evaluated(0, 0.1)]
    for ended in (lines, [*lines, *after]):
        finding = found(ended, settings, whereabouts=where("gone"))["gone"]
        assert "the run ended in the supervised phase at step 300 of 400" in finding.what
    lines += [line | {"phase": "preference"} for line in steps(number=7)]
    finding = found(lines, settings, whereabouts=where("gone"))["gone"]
    assert "the preference phase at step 7 of 50" in finding.what
    assert [reading.name for reading in finding.evidence[:2]] == ["last step", "preference.num_steps"]
    lines = [*steps(number=12), {"step": 12, "phase": "stop", "stop/reason": "min_entropy"}]
    assert "the reinforcement phase at step 12 of 160" in found(lines, settings, whereabouts=where("gone"))["gone"].what
    assert "in the start-up phase at step 0 of 160" in found([], settings, whereabouts=where("gone"))["gone"].what


def test_one_slow_step():
    def lasting(seconds):
        return steps(time__step_s=[1.0] * 14 + [seconds] + [1.0] * 5, time__reward_s=[0.1] * 14 + [8.0] + [0.1] * 5)

    finding = by_metrics("slow_step", lasting(10.5), lasting(9.5))
    assert "step 15 took 10.5 s" in finding.what and "time/reward_s" in finding.what
    assert found(steps(time__step_s=[60.0] + [1.0] * 19)) == {}  # the first step compiles
    assert found(steps(time__step_s=[0.1] * 10 + [4.0] + [0.1] * 9)) == {}  # hardly noticed
    assert found(lasting(10.5), begun=[0, 14]) == found(lasting(10.5), begun=[0, 13]) == {}  # and so after a resume
    assert "slow_step" in found(lasting(10.5), begun=[0, 12])


def test_memory_that_grows():
    def sampled(per_step, noise=0.0):
        return [
            {"who": who, "pid": 1, "attempt": 1, "step": i + 1, "rss_mib": 800 + grows * i + noise * (i % 3)}
            for i in range(60)
            for who, grows in (("controller", per_step), ("policy-0", 0.0))
        ]

    finding = found(samples=sampled(12.0, noise=20))["memory"]
    assert finding.what.startswith("controller: its memory grew by") and "12 MiB a step" in finding.what
    assert found(samples=sampled(7.0)) == {}  # less than a quarter
    filled = [sample | {"rss_mib": min(sample["rss_mib"], 1200)} for sample in sampled(40.0)]
    assert found(samples=filled) == {}  # a cache that has filled
    few = [sample for sample in sampled(12.0) if sample["step"] % 6 == 0]
    assert found(samples=few) == {}


# Numerics.


def test_mismatch_from_the_first_step():
    finding = by_metrics("mismatch", steps(mismatch__kl=1.1e-5), steps(mismatch__kl=0.9e-5), FLOAT32)
    assert "from the first steps" in finding.what and "float32" in finding.what
    by_metrics("mismatch", steps(mismatch__kl=1.1e-3), steps(mismatch__kl=0.9e-3))
    by_metrics("mismatch", steps(mismatch__kl=0.11), steps(mismatch__kl=0.09), LAG)


def test_mismatch_that_rises_and_falls_again():
    def rising(to):
        return steps(mismatch__kl=[1e-13] * 8 + [to] * 5 + [1e-13] * 7)

    finding = by_metrics("mismatch", rising(4e-6), rising(2.9e-6), FLOAT32)
    assert "rose from 1.0e-13" in finding.what and (finding.evidence[-1].step, len(finding.evidence)) == (13, 10)
    assert found(steps(mismatch__kl=[1e-13] * 8 + [1.0] * 2 + [1e-13] * 10), FLOAT32) == {}  # two batches of noise


def test_tokens_that_are_too_old():
    by_metrics("lag", steps(policy__lag_max=[0] * 19 + [1]), steps(policy__lag_max=0))
    assert found(steps(policy__lag_max=2), LAG) == {}  # as allowed

    def far(share):
        drift = {"policy/far_lag0_frac": 0.0, "policy/far_lag2_frac": share}
        return [line | drift | {"tokens/trained_lag0": 900, "tokens/trained_lag2": 100} for line in steps()]

    assert "51%" in by_metrics("lag", far(0.51), far(0.49), LAG).what


def test_much_is_clipped():
    by_metrics("clip_share", steps(policy__clip_frac=0.41), steps(policy__clip_frac=0.39))


def test_steps_that_are_skipped():
    assert (
        "at step 20" in by_metrics("steps_skipped", steps(optim__skipped=[0] * 19 + [1]), steps(optim__skipped=0)).what
    )
    assert "steps_skipped" in found(steps(loss__mean=[0.1] * 19 + [math.nan]))
    assert "steps_skipped" in found(steps(critic__skipped=[0] * 19 + [1]))
    assert found(steps(optim__skipped=[0] * 19 + [1]), thresholds={"steps_skipped": 2}) == {}


# Learning.


def test_entropy_collapses_without_a_gain():
    def falling(to, reward):
        return steps(policy__entropy=[1.0] * 10 + [to] * 10, reward__mean=[0.2] * 10 + [reward] * 10)

    by_metrics("entropy_collapse", falling(0.09, 0.3), falling(0.11, 0.3))
    by_metrics("entropy_collapse", falling(0.01, 0.59), falling(0.01, 0.61))  # half of the way to 1 has been learned


def test_groups_without_signal():
    def silent(share, number=10, reward=0.2):
        return steps(number=20, reward__zero_std_frac=[0.1] * (20 - number) + [share] * number, reward__mean=reward)

    by_metrics("no_signal", silent(0.9), silent(0.89))
    by_metrics("no_signal", silent(1.0), silent(1.0, number=9))
    constant = [line | {"reward/std": 0.0} for line in silent(1.0)]
    assert "the same for every rollout" in found(constant)["no_signal"].what
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.algorithm.after_rewards = print
    assert found(silent(1.0), resolved(config)) == {}  # something else than the siblings' rewards may train


def test_reward_is_saturated():
    def full(reward, number=20):
        share, rewards = [0.2] * (20 - number) + [0.95] * number, [0.5] * (20 - number) + [reward] * number
        return steps(reward__zero_std_frac=share, reward__mean=rewards)

    assert "since the first step" in by_metrics("saturation", full(0.95), []).what
    assert found(full(0.96, number=9)) == {}
    assert found(full(0.94)).keys() == {"no_signal"}


def test_completions_are_cut_off():
    late = steps(completion__truncated_frac=[0.0] * 15 + [0.31] * 5)
    early = steps(completion__truncated_frac=[1.0] * 15 + [0.29] * 5)
    assert "sampling.max_tokens=12" in by_metrics("truncation", late, early, {"sampling": {"max_tokens": 12}}).what


def test_length_drifts():
    def growing(to, *accuracies):
        lines = steps(completion__length_mean=[8.0] * 10 + [to] * 10, reward__mean=[0.2] * 10 + [0.3] * 10)
        return [*lines, *(evaluated(10 * i, accuracy) for i, accuracy in enumerate(accuracies))]

    by_metrics("length_drift", growing(16.1), growing(15.9))
    by_metrics("length_drift", growing(3.9), growing(4.1))
    by_metrics("length_drift", growing(20.0, 0.3, 0.34), growing(20.0, 0.3, 0.36))  # longer because they are better
    assert found(growing(20.0, 0.96, 1.0)) == {}  # all that there was to gain
    assert found(steps(completion__length_mean=[1.0] * 10 + [4.0] * 10)) == {}  # three tokens


def test_evaluation_falls_while_reward_rises():
    lines = steps(reward__mean=lambda step: 0.01 * step)
    above, below = [evaluated(0, 0.5), evaluated(5, 0.6), evaluated(20, 0.49)], [evaluated(5, 0.6), evaluated(20, 0.51)]
    finding = by_metrics("eval_falls", [*lines, *above], [*lines, *below])
    assert "0.600 (step 5) to 0.490 (step 20)" in finding.what
    assert found([*steps(reward__mean=lambda step: -0.01 * step), *above]) == {}
    assert found([*lines, evaluated(5, 0.6, around=0.2), evaluated(20, 0.3, around=0.2)]) == {}  # eight tasks


def test_a_fall_from_all_right_is_judged_by_intervals_that_have_a_width():
    def with_interval(step, right, tasks=30):
        low, high = score_interval([1] * right + [0] * (tasks - right))
        line = {"step": step, "phase": "evaluation", "eval/name": "sort", "eval/split": "validation"}
        return line | {"eval/accuracy": right / tasks, "eval/accuracy_ci95_low": low, "eval/accuracy_ci95_high": high}

    lines = steps(reward__mean=lambda step: 0.01 * step)
    assert found([*lines, with_interval(5, 30), with_interval(20, 24)]) == {}  # [.886, 1] and [.627, .905]
    assert found([*lines, with_interval(5, 30), with_interval(20, 21)]).keys() == {"eval_falls"}  # [.521, .833]
    alone = [{"step": step, "phase": "evaluation", "eval/name": "sort", "eval/split": "validation"} for step in (5, 20)]
    one_task = [line | {"eval/accuracy": right} for line, right in zip(alone, (1.0, 0.0))]
    assert found([*lines, *one_task]) == {}  # one task has no interval, and says nothing of others


def test_other_evaluations_do_not_count():
    lines, hard = steps(reward__mean=lambda step: 0.01 * step), {"controller": {"eval_sets": {"hard": {}}}}
    own = [evaluated(step, 0.8) for step in (5, 20)]
    assert found([*lines, *own, evaluated(20, 0.2, name="hard")], hard) == {}


def rolled(text, reward=0.1, tasks=16, step=20, parts=None):
    """Four rollouts of each task; `text` is a function of task and rollout."""
    return [
        {
            "step": step,
            "group_id": f"{i}",
            "task_id": f"t{i}",
            "text": text(i, j),
            "reward": reward,
            "reward_parts": parts,
        }
        for i in range(tasks)
        for j in range(4)
    ]


def test_one_answer_to_everything():
    assert "'2'" in found(rollouts=rolled(lambda i, j: "2" if i < 13 else f"{i}/{j}"))["duplicates"].what
    assert found(rollouts=rolled(lambda i, j: "2" if i < 12 else f"{i}/{j}")) == {}
    assert found(rollouts=rolled(lambda i, j: "yes", reward=1.0)) == {}  # and right
    assert found(rollouts=rolled(lambda i, j: "2", tasks=7)) == {}


def test_siblings_that_are_copies():
    lines = steps(policy__entropy=0.5, completion__length_mean=5.0)
    assert "independently" in found(lines, rollouts=rolled(lambda i, j: f"{i}"))["duplicates"].what
    sure = steps(policy__entropy=0.05, completion__length_mean=5.0)
    assert found(sure, rollouts=rolled(lambda i, j: f"{i}")) == {}
    assert found(lines, rollouts=rolled(lambda i, j: f"{i}" if i < 12 else f"{i}/{j}")) == {}


@pytest.mark.parametrize(
    "text, why", [("  ", "empty"), ("ab\ufffd\ufffd\x00", "undecodable"), ("so " + "ab, " * 20, "over and over")]
)
def test_answers_that_cannot_be_read(text, why):
    finding = found(rollouts=rolled(lambda i, j: text if i < 9 else f"answer {i}/{j}"))["unparsable"]
    assert why in finding.what and "56%" in finding.what
    assert found(rollouts=rolled(lambda i, j: text if i < 8 else f"answer {i}/{j}")) == {}


def test_answers_without_their_form():
    answers = rolled(lambda i, j: f"answer {i}/{j}", parts={"format": 0.0, "exact": 0.0})
    assert "form" in found(rollouts=answers)["unparsable"].what
    assert found(rollouts=rolled(lambda i, j: f"answer {i}/{j}", parts={"format": 0.1, "exact": 0.0})) == {}


def test_answers_of_the_right_form_have_it_whatever_their_parts_are_named():
    def answers(reward, **parts):
        return found(rollouts=rolled(lambda i, j: f"answer {i}/{j}", reward=reward, parts=parts))

    for name in ("format_penalty", "invalid", "parse_error", "malformed"):
        assert answers(0.5, exact=1.0, **{name: 0.0}) == {}, name
    assert answers(1.0, exact=1.0, valid=0.0) == {}  # an answer that earns the best reward could be read
    assert "unparsable" in answers(0.5, exact=1.0, valid=0.0)


# All of them.


def test_nothing_is_said_of_nothing():
    assert found() == {}
    assert found(steps(number=1, reward__mean=0.0, policy__entropy=1.0, mismatch__kl=1e-13)) == {}


def test_names_are_unique_and_areas_in_order():
    names, areas = [rule.name for rule in RULES], [rule.area for rule in RULES]
    assert len(names) == len(set(names)) >= 15
    assert areas == sorted(areas, key=("liveness", "numerics", "learning").index)


def test_thresholds_are_checked():
    check_thresholds({"truncation": 0.5}, "")
    with pytest.raises(ValueError, match=r"record\.thresholds\.truncaton=1: there is no such rule; did you mean trunc"):
        check_thresholds({"truncaton": 1}, "record.thresholds.")
    with pytest.raises(ValueError, match="is no number"):
        check_thresholds({"truncation": math.nan}, "")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.py")), ids=lambda file: file.stem)
def test_siblings_are_compared_alike_by_config_and_record(file):
    config = load_config(str(file))
    assert recorded_compares_siblings(resolved(config)) == compares_siblings(config)


def test_the_page_has_the_rules_as_they_are():
    text = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \| ([\d.]+) (.*) \| (.*) \|$", text, re.MULTILINE)
    assert rows == [
        (rule.name, rule.area, rule.reads, f"{rule.threshold:g}", rule.means, rule.advice) for rule in RULES
    ]
