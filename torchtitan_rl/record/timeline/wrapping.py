"""Functions of `points.POINTS` replaced by functions that time them, and put back."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry import context

from torchtitan_rl.record.timeline.points import Point
from torchtitan_rl.record.timeline.spans import Spans

__all__ = ["wrap", "find"]


def wrap(spans: Spans, points: Iterable[Point], done: dict[str, Callable[[], None]]) -> None:
    """Replaces the functions of `points` whose modules are imported and whose names `done` lacks. Adds to `done`, by
    name, what puts a function back."""
    for point in points:
        if point.where not in done and _module(point) is not None:
            owner, name, function = find(point)
            setattr(owner, name, _HOW[point.how](spans, point, function))
            done[point.where] = functools.partial(setattr, owner, name, function)


def find(point: Point) -> tuple[Any, str, Callable]:
    """(module or class, attribute's name, function). Raises ValueError where the package has no such function."""
    *parents, name = point.where.partition(":")[2].split(".")
    owner: Any = _module(point)
    try:
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, getattr(owner, name)
    except AttributeError as error:
        raise ValueError(f"timeline point={point.where!r}: is not there ({error}); mend the table") from None


def _module(point: Point) -> Any:
    """The module of a point; None where it is not imported. What `python -m` runs has another name there."""
    name, main = point.where.partition(":")[0], sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return main if spec is not None and spec.name == name else sys.modules.get(name)


def _attributes(point: Point, args: tuple, named: dict[str, Any]) -> dict[str, int] | None:
    if not point.attributes:
        return None
    return {name: int(value.format(*args[1:], **named)) for name, value in point.attributes.items()}


def _named(text: str, args: tuple) -> str:
    if "{" not in text:
        return text
    return text.format(*(getattr(argument, "__name__", argument) for argument in args[1:]), self=args[0])


def _whole(spans: Spans, point: Point, function: Callable) -> Callable:
    least, kind = point.least_us * 1000, "work" if point.name else "wait"
    text = point.name or point.wait

    def note(start: int, args: tuple, named: dict[str, Any]) -> None:
        if (end := spans.now()) - start >= least:
            spans.leaf(_named(text, args), kind, start, end, attributes=_attributes(point, args, named))  # type: ignore[arg-type]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def timed(*args: Any, **named: Any) -> Any:
            start = spans.now()
            try:
                return await function(*args, **named)
            finally:
                note(start, args, named)
    else:

        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            start = spans.now()
            try:
                return function(*args, **named)
            finally:
                note(start, args, named)

    return timed


def _phase(spans: Spans, point: Point, function: Callable) -> Callable:
    @functools.wraps(function)
    async def timed(*args: Any, **named: Any) -> Any:
        begun = spans.begin(_named(point.name, args), spans.now())
        try:
            return await function(*args, **named)
        finally:
            spans.end(begun)

    return timed


def _running(spans: Spans, point: Point, function: Callable) -> Callable:
    @functools.wraps(function)
    async def timed(*args: Any, **named: Any) -> Any:
        return await _driven(spans, _named(point.name, args), _named(point.wait, args), function(*args, **named))

    return timed


@types.coroutine
def _driven(spans: Spans, work: str, wait: str, coroutine: Any):
    """Runs a coroutine as `await` does, and notes when it runs and when it is suspended."""
    resume, value = coroutine.send, None
    while True:
        start = spans.now()
        try:
            awaited = resume(value)
        except StopIteration as end:
            return end.value
        finally:
            stopped = spans.now()
            if work:
                spans.piece(work, start, stopped)
        key = spans.wait_begins(wait, stopped) if wait else ()
        try:
            value, resume = (yield awaited), coroutine.send
        except BaseException as error:  # a cancellation too: the coroutine decides what follows
            value, resume = error, coroutine.throw
        finally:
            if wait:
                spans.wait_ends(key, spans.now())


def _sent(spans: Spans, point: Point, function: Callable) -> Callable:
    @functools.wraps(function)
    def timed(*args: Any, **named: Any) -> Any:
        start = spans.now()
        answer, sent = function(*args, **named), spans.now()
        spans.piece(_named(point.name, args), start, sent)
        wait, parent = _named(point.wait, args), context.get_current()
        if not isinstance(answer, asyncio.Future):
            return _until(spans, wait, sent, answer)
        answer.add_done_callback(lambda _: spans.leaf(wait, "wait", sent, spans.now(), parent=parent))
        return answer

    return timed


async def _until(spans: Spans, wait: str, start: int, answer: Any) -> Any:
    try:
        return await answer
    finally:
        spans.leaf(wait, "wait", start, spans.now())


def _served(spans: Spans, point: Point, function: Callable) -> Callable:
    ended: dict[int, int] = {}  # of each object that serves: when its last call ended

    def begin(args: tuple) -> int:
        start = spans.now()
        if before := ended.get(id(args[0]), 0):
            spans.leaf(point.wait, "wait", before, start)
        return start

    def end(start: int, args: tuple) -> None:
        ended[id(args[0])] = now = spans.now()
        spans.leaf(_named(point.name, args), "work", start, now)

    async def answered(start: int, args: tuple, answer: Any) -> Any:
        try:
            return await answer
        finally:
            end(start, args)

    @functools.wraps(function)
    def timed(*args: Any, **named: Any) -> Any:
        start, answer = begin(args), None
        try:
            answer = function(*args, **named)
        finally:
            if not inspect.isawaitable(answer):
                end(start, args)
        return answered(start, args, answer) if inspect.isawaitable(answer) else answer

    return timed


def _given(spans: Spans, point: Point, function: Callable) -> Callable:
    @functools.wraps(function)
    def passed_on(given: Callable, *args: Any) -> Any:
        def timed(*args: Any) -> Any:
            start = spans.now()
            try:
                return given(*args)
            finally:
                spans.piece(point.name, start, spans.now())

        return function(timed, *args)

    return passed_on


_HOW = {"whole": _whole, "phase": _phase, "running": _running, "sent": _sent, "served": _served, "given": _given}
