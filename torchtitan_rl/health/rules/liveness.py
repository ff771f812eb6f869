"""Rules about who works, who waits, and who is gone."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from statistics import median
from typing import Any

from torchtitan_rl.health.facts import Reading, RunFacts, Series, duration
from torchtitan_rl.health.rules.rule import RECENT, Problem, Rule, batches, few, last, middle
from torchtitan_rl.health.whereabouts import Whereabouts, end_of, pulse, seconds_since
from torchtitan_rl.metrics import PHASES

__all__ = ["LIVENESS"]

_LEAST_SILENCE_S, _START_S = 60.0, 300.0
_LEAST_EXCESS_S = 5.0
_LEAST_OVERDUE_S, _LONG_START_S, _NEWEST_LINES = 10.0, 120.0, 50
_FEW_STEPS = 5
_FEW_SAMPLES, _LATE_SAMPLES = 12, 60
_LEAST_GROWTH_MIB = 128.0
_SPANS = {"step": "time/step_s", "generate": "time/generate_s", "sync": "time/sync_s", "score": "time/score_s"}
"""Span of `status.json` -> the metric with its usual seconds."""
_WAIT_FOR_EVALUATIONS = ("step", "sync")
"""Spans within which a publication waits; `time/sync_s` leaves the wait out."""
_PARTS = ("time/reward_s", "time/generate_s", "time/forward_backward_s", "time/optim_s", "time/score_s", "time/sync_s")


def dead_replica(facts: RunFacts, threshold: float) -> Problem | None:
    """A replica of the generator died or was given up, replaced or not."""
    lost = [event for event in facts.events if event.get("kind") == "replica_lost"]
    evidence = [Reading(str(event.get("who")), event.get("step"), str(event.get("text"))) for event in lost]
    falls = _falls(facts)
    left = sum(event.get("kind") == "replica_left" for event in facts.events)  # these were asked to leave
    number = max(len(lost), sum(falls.values()) - left)
    if number < threshold or not number:
        return None
    evidence += list(falls)[:10]
    replaced = sum(event.get("kind") == "replica_replaced" for event in facts.events)
    who = ", ".join(sorted({str(event.get("who")) for event in lost})) or "replicas of the generator"
    return Problem(f"{who}: lost; losses in all: {number}, replacements that have started: {replaced}", evidence)


def _falls(facts: RunFacts) -> dict[Reading, int]:
    """The readings at which fewer replicas were healthy than a batch before -> by how many. Another attempt at the run,
    or a fork of it, may begin with fewer."""
    falls: dict[Reading, int] = {}
    for before, now in itertools.pairwise(facts.series("generator/healthy_replicas")):
        fewer = int(float(before.value) - float(now.value))
        begins = any((before.step or 0) <= step < (now.step or 0) for step in facts.begun)
        if fewer > 0 and not begins:
            falls[now] = fewer
    return falls


def slow_replica(facts: RunFacts, threshold: float) -> Problem | None:
    """One replica takes much longer for a request than its siblings."""
    waits, known = _seconds_per_request(facts.samples)
    who, slowest = max(waits.items(), key=lambda item: item[1], default=("", 0.0))
    sibling_waits = [seconds for other, seconds in waits.items() if other != who and other in known]
    usual = median(sibling_waits) if sibling_waits else math.inf
    if slowest <= threshold * usual:
        return None
    evidence: Series = [Reading(f"{name} s/request", None, seconds) for name, seconds in sorted(waits.items())]
    return Problem(f"{who}: takes {slowest:.3g} s for a request, the other replicas {usual:.3g} s", evidence)


def _seconds_per_request(samples: list[dict[str, Any]]) -> tuple[dict[str, float], set[str]]:
    """Replica -> mean seconds from sending a request to its answer, by Little's law: requests in flight, summed over
    time, over requests answered. Of the newest samples of the newest attempt: counts begin again with each attempt.

    Also the replicas that have answered enough to know; for the others the seconds are a lower bound."""
    waits: dict[str, float] = {}
    known: set[str] = set()
    newest = max((sample.get("attempt") or 0 for sample in samples), default=0)
    by_replica: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        if sample.get("in_flight_s") is not None and (sample.get("attempt") or 0) == newest:
            by_replica[str(sample["who"])].append(sample)
    for who, own in by_replica.items():
        own = own[-_LATE_SAMPLES:]
        seconds, answered = (float(own[-1][name] - own[0][name]) for name in ("in_flight_s", "answered"))
        waits[who] = seconds / max(answered, _FEW_SAMPLES)
        if answered >= _FEW_SAMPLES:
            known.add(who)
    return waits, known


def idle_trainer(facts: RunFacts, threshold: float) -> Problem | None:
    """The trainers wait for most of a step."""
    recent = last(_idle(facts))
    if not recent or middle(recent) <= threshold:
        return None
    parts = {
        "the rewards": "time/reward_s",
        "the generators": "time/generate_s",
        "new weights": "time/sync_s",
        "an evaluation": "time/eval_wait_s",
    }
    seconds = {who: last(facts.series(name)) for who, name in parts.items()}
    waits = {who: middle(series) for who, series in seconds.items() if series}
    waits["the generators"] = max(0.0, waits.get("the generators", 0.0) - waits.get("the rewards", 0.0))
    cause = max(waits, key=lambda who: waits[who])
    step_s = middle(last(facts.series("time/step_s")))
    sentence = f"trainers wait for {middle(recent):.0%} of a step, most of it for {cause}"
    return Problem(f"{sentence} ({waits[cause]:.2f} of {step_s:.2f} s)", [*recent, *seconds[cause]])


def _idle(facts: RunFacts) -> Series:
    """The share of each step in which no trainer trained or scored."""
    if recorded := facts.series("trainer/idle_frac"):
        return recorded
    names = ("time/forward_backward_s", "time/optim_s", "time/score_s")
    return [
        Reading("trainer idle", line["step"], 1 - sum(line.get(name, 0.0) for name in names) / line["time/step_s"])
        for line in facts.steps
        if line.get("time/step_s") and names[0] in line
    ]


def stall(facts: RunFacts, threshold: float) -> Problem | None:
    """The run's process is there and nothing goes on."""
    process = facts.whereabouts
    if process is None or process.state != "running" or process.written is None:
        return None
    silence = facts.now - process.written
    work, usual = _usual_work(facts)
    if silence <= (_START_S if usual is None else max(_LEAST_SILENCE_S, threshold * usual)):
        return None
    step = facts.lines[-1]["step"] if facts.lines else None
    sentence, evidence = f"nothing was written for {silence:.0f} s", []
    evidence.append(Reading("seconds since the run last wrote", step, silence))
    if usual is not None:
        sentence += f", {work} usually takes {usual:.2g} s"
        evidence.append(Reading(f"usually for {work}, seconds", step, usual))
    return Problem(f"{sentence}; {_doing(facts)}", evidence)


def _usual_work(facts: RunFacts) -> tuple[str, float | None]:
    """What the run is at, a step or an evaluation, and the seconds after which it usually writes; None: nobody knows,
    as while it starts, in its first evaluation, and in the first step of a phase."""
    doing = [str(span.get("name")) for span in facts.spans]
    evaluates = any(name.startswith("evaluating") for name in doing)
    if any(name.startswith("starting") for name in doing):
        return "a start", None
    phase = "evaluation" if evaluates else _phase(facts)
    lines = [line for line in facts.lines if line.get("phase") == phase and line.get("time/step_s")]
    seconds = [line["time/step_s"] for line in lines[-20:]]
    return "an evaluation" if evaluates else "a step", median(seconds) if seconds else None


def _phase(facts: RunFacts) -> str:
    """The phase of optimizer steps that is under way; where nobody knows, that of the last line of one; "": none."""
    open_phases = [str(span["name"]) for span in facts.spans if span.get("name") in PHASES]
    written = (line["phase"] for line in reversed(facts.lines) if line.get("phase") in PHASES)
    return open_phases[-1] if open_phases else next(written, "")


def _doing(facts: RunFacts) -> str:
    names = [str(span.get("name")) for span in facts.spans]
    return f"the controller is in: {' > '.join(names)}" if names else "what it waits for is not recorded"


def gone(facts: RunFacts, threshold: float) -> Problem | None:
    """The run's process is gone, and the run has not come to an end."""
    process = facts.whereabouts
    if process is None or process.state in ("running", "unknown"):
        return None
    end = end_of(facts.status, facts.events)
    if _finished(facts) and end.get("kind") != "run_failed":  # which it may after its last evaluation
        return None
    if process.state == "elsewhere" and _silence(process, facts) <= threshold:
        return None
    phase, step = next(
        ((line["phase"], line["step"]) for line in reversed(facts.lines) if line.get("phase") in PHASES),
        ("start-up", 0),
    )
    setting = f"{phase if phase in ('supervised', 'preference') else 'controller'}.num_steps"
    planned = facts.setting(setting, "?")
    if end.get("kind") in ("preempted", "interrupted"):
        return None  # as it was asked to
    why = process.ended or end.get("text") or "it left no reason: it was killed, or its host failed"
    evidence = [Reading("last step", step, phase), Reading(setting, None, planned)]
    if process.pid is not None:
        evidence.append(Reading(f"pid on {process.host}", None, process.pid))
    return Problem(f"the run ended in the {phase} phase at step {step} of {planned}: {why}", evidence)


def _silence(process: Whereabouts, facts: RunFacts) -> float:
    """Seconds without a sign of life of a process on another host: it has written, or has reported in `status.json`."""
    reported_s = seconds_since(facts.status.get("at"), facts.now)
    written_s = facts.now - (process.written or facts.now)
    return written_s if reported_s is None else min(written_s, reported_s)


def _finished(facts: RunFacts) -> bool:
    """Whether the run came to its end: its last checkpoint is on disk. A run without a status, which an older version
    made, has ended with its evaluation on test tasks."""
    if facts.status:
        return facts.status.get("ended") == "finished"
    return any(line.get("eval/split") == "test" for line in facts.own_evaluations[-1:])


def slow_step(facts: RunFacts, threshold: float) -> Problem | None:
    """One step took far longer than its peers."""
    steps = []
    for number, line in enumerate(facts.steps):
        early = any(earlier["step"] in facts.begun for earlier in facts.steps[max(0, number - 2) : number])
        if line.get("time/step_s") and number > 1 and not early:  # first steps compile and fill caches
            seconds = line["time/step_s"] - line.get("time/eval_wait_s", 0.0)
            steps.append(Reading("time/step_s", line["step"], seconds))
    if len(steps) < _FEW_STEPS:
        return None
    usual, slowest = middle(steps), max(steps, key=lambda reading: float(reading.value))
    if float(slowest.value) <= max(threshold * usual, usual + _LEAST_EXCESS_S):
        return None
    line = next(line for line in facts.steps if line["step"] == slowest.step)
    parts = [Reading(name, slowest.step, line[name]) for name in _PARTS if line.get(name)]
    sentence = f"step {slowest.step} took {slowest.value:.1f} s, a step usually takes {usual:.2g} s"
    # Rewards are within the generation: the first part that is most of the step says most.
    if most := next((part for part in parts if float(part.value) > 0.5 * float(slowest.value)), None):
        sentence += f"; {most.value:.1f} s of it are {most.name}"
    return Problem(sentence, [slowest, *parts])


def overdue(facts: RunFacts, threshold: float) -> Problem | None:
    """What the run is doing now takes much longer than usual."""
    process = facts.whereabouts
    if facts.status.get("ended") or process is None or process.ended:
        return None
    if pulse(process, facts.status, facts.now) not in ("reports", "silent"):
        return None
    sentences: list[str] = []
    evidence: Series = []
    waited_s = _waits_for_evaluation_s(facts)
    for span in facts.spans:
        name, seconds = str(span.get("name")), seconds_since(span.get("since"), facts.now)
        if seconds is None or span.get("total"):  # a phase, which is as long as its steps
            continue
        if name in _WAIT_FOR_EVALUATIONS:
            seconds -= waited_s
        usual = _usual_s(facts, _SPANS.get(name, ""))
        if usual is not None and seconds > max(_LEAST_OVERDUE_S, threshold * usual):
            sentences.append(f"{name} has taken {duration(seconds)} so far; usually {duration(usual)}")
        elif name.startswith("starting") and seconds > _LONG_START_S:
            sentences.append(f"{name} has taken {duration(seconds)} so far")
        else:
            continue
        evidence.append(Reading(f"{name}, seconds so far", facts.status.get("step"), seconds))
    return Problem("; ".join(sentences), evidence) if sentences else None


def _waits_for_evaluation_s(facts: RunFacts) -> float:
    """Seconds for which a publication has waited for an evaluation, which a run with a lag makes meanwhile."""
    since = [span.get("since") for span in facts.spans if span.get("name") == "wait for the evaluation"]
    return (seconds_since(since[0], facts.now) or 0.0) if since else 0.0


def _usual_s(facts: RunFacts, metric: str) -> float | None:
    """The median of a metric's newest values in the phase that is under way; None: it has none yet."""
    phase = _phase(facts)
    values = [line[metric] for line in facts.lines if line.get("phase") == phase and _is_number(line.get(metric))]
    return median(values[-_NEWEST_LINES:]) if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int)


def memory(facts: RunFacts, threshold: float) -> Problem | None:
    """The memory of a process grows and grows."""
    grown = []
    by_process: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for sample in facts.samples:
        if sample.get("rss_mib") is not None and sample.get("step", 0) > 0:
            by_process[sample.get("attempt"), sample["who"], sample.get("pid")].append(sample)
    for own in by_process.values():
        own = own[len(own) // 4 :]  # caches and pools fill at first
        if len(own) < _FEW_SAMPLES:
            continue
        quarters = [own[i * len(own) // 4 : (i + 1) * len(own) // 4] for i in range(4)]
        levels = [median(sample["rss_mib"] for sample in quarter) for quarter in quarters]
        growth = levels[3] - levels[0]
        steady = all(later - earlier >= growth / 8 for earlier, later in zip(levels, levels[1:], strict=False))
        if steady and growth >= max(_LEAST_GROWTH_MIB, threshold * levels[0]):
            grown.append((growth, levels, quarters))
    if not grown:
        return None
    growth, levels, quarters = max(grown, key=lambda item: item[0])
    who = quarters[0][0]["who"]
    begin, end = (round(median(sample["step"] for sample in quarter)) for quarter in (quarters[0], quarters[3]))
    evidence = [
        Reading(f"{who} MiB", quarter[-1]["step"], level) for level, quarter in zip(levels, quarters, strict=True)
    ]
    per_step = f", {growth / (end - begin):.2g} MiB a step" if end > begin else ""
    return Problem(f"{who}: its memory grew by {growth:.0f} MiB from step {begin} to step {end}{per_step}", evidence)


def _lacks_events(facts: RunFacts) -> str:
    known = facts.status or facts.events or facts.series("generator/healthy_replicas")
    return "" if known else "needs status.json, events or `generator/healthy_replicas`; there is none of them"


def _lacks_request_times(facts: RunFacts) -> str:
    replicas = facts.setting("generator.num_replicas")
    if replicas is not None and int(replicas) < 2:
        return ""  # nobody to compare with
    timed = [sample for sample in facts.samples if sample.get("in_flight_s") is not None]
    return "" if timed else "needs samples of requests; there are none"


def _lacks_idle(facts: RunFacts) -> str:
    return few("the parts of `time/step_s`", len(_idle(facts)), RECENT)


def _lacks_process(facts: RunFacts) -> str:
    process = facts.whereabouts
    return (
        "needs run.lock, which says whose process the run is" if process is None or process.state == "unknown" else ""
    )


def _lacks_status(facts: RunFacts) -> str:
    return "" if facts.status else "needs status.json, which says what the run is doing"


def _lacks_samples(facts: RunFacts) -> str:
    kept = _FEW_SAMPLES * 4 // 3  # the first quarter does not count
    processes = Counter(
        (sample.get("attempt"), sample["who"], sample.get("pid"))
        for sample in facts.samples
        if sample.get("rss_mib") is not None and sample.get("step", 0) > 0
    )
    return few("the memory", max(processes.values(), default=0), kept, "samples of a process")


LIVENESS = (
    Rule(
        "dead_replica",
        "liveness",
        dead_replica,
        threshold=1,
        means="replicas lost so far",
        reads="events; `generator/healthy_replicas`",
        advice="look at the log of the generator that is named; a kill by the kernel for memory is in `dmesg`; "
        "`generator.max_replica_restarts` says how many replacements may start",
        lacks=_lacks_events,
        live="",  # the sampling client warns of each
    ),
    Rule(
        "slow_replica",
        "liveness",
        slow_replica,
        threshold=2.5,
        means="times the seconds per request of the other replicas",
        reads="samples: requests in flight and answered, per replica",
        advice="look at what else runs on its host or device (`nvidia-smi`, `top`); end the process of the replica: "
        "another one takes its place",
        lacks=_lacks_request_times,
        live="samples",
    ),
    Rule(
        "idle_trainer",
        "liveness",
        idle_trainer,
        threshold=0.9,
        means="share of a step in which no trainer works",
        reads="`trainer/idle_frac`, or `time/forward_backward_s`, `time/optim_s`, `time/score_s` of `time/step_s`",
        advice="rewards: make them faster, or mark them cpu_bound; generators: more replicas, or "
        "`algorithm.max_policy_lag=1`, which generates while it trains; weights: look at `time/sync_s`",
        lacks=_lacks_idle,
    ),
    Rule(
        "stall",
        "liveness",
        stall,
        threshold=20,
        means="times the usual step (while it evaluates: evaluation), and at least 60 s, without a sign of life; 300 s "
        "in a start and a first evaluation",
        reads="when metrics, tables and checkpoints were last written",
        advice="look at the newest lines in logs/; a reward, an environment or a collective may hang: "
        "`py-spy dump --pid` shows where; `--max-restarts` begins again by itself",
        lacks=_lacks_process,
        live="",
    ),
    Rule(
        "gone",
        "liveness",
        gone,
        threshold=600,
        means="seconds without a sign of life, for a run of another host; a process of this host is seen at once",
        reads="run.lock, ended.json, the last line of metrics.jsonl, events",
        advice="mend what is named, then go on with `torchtitan-rl train CONFIG --resume latest --output-dir RUN`, a "
        "fork with its own command and the same two options; `--max-restarts N` does that by itself",
        lacks=_lacks_process,
        live="",
    ),
    Rule(
        "slow_step",
        "liveness",
        slow_step,
        threshold=10,
        means="times the median step, and at least 5 s more",
        reads="`time/step_s` without `time/eval_wait_s`",
        advice="look at the part of the step that is named: a reward that waits for a service, a generator that was "
        "replaced, a store on a slow disk",
        lacks=batches("time/step_s", number=_FEW_STEPS + 2),
    ),
    Rule(
        "overdue",
        "liveness",
        overdue,
        threshold=5,
        means="times the usual seconds, and at least 10 s, that a step or a part of it has taken so far; a start 120 s",
        reads="status.json; `time/step_s`, `time/generate_s`, `time/sync_s`, `time/score_s`",
        advice="wait, or look at the newest lines in logs/ for what it waits for; `py-spy dump --pid` shows where",
        lacks=_lacks_status,
        live="",  # of a run that is there to be looked at from elsewhere
    ),
    Rule(
        "memory",
        "liveness",
        memory,
        threshold=0.25,
        means="growth, as a share of what the process held after its first quarter, and at least 128 MiB",
        reads="samples: memory of each process of the run on this host",
        advice="look at what the process keeps: a reward or an environment that collects, a cache without a bound; "
        "`tracemalloc` in the reward shows where",
        lacks=_lacks_samples,
        live="samples",
    ),
)
"""The rules, in the order in which they are told."""
