"""A rehearsal as tables, and as JSON."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchtitan_rl.tools.rehearse.hardware import REACHED, Hardware
from torchtitan_rl.tools.rehearse.rehearsal import Rehearsal

__all__ = ["print_report", "as_json"]

_WIDTH = 118


class _ReportConsole(Console):
    """A console whose reader may go (`| head`): the command answers that itself, where rich would end with status 1."""

    def on_broken_pipe(self) -> None:
        raise


def print_report(rehearsal: Rehearsal, hardware: Hardware) -> None:
    """Prints who sits where, memory, traffic, times, warnings and refusals, the refusals last."""
    console = _ReportConsole(width=_WIDTH, highlight=False)
    if rehearsal.seats:
        _print(console, "Who sits where", ("hosts", "meshes"), [_seat(seat) for seat in rehearsal.seats])
        _print_memory(console, rehearsal)
    if rehearsal.work is not None:
        work = rehearsal.work
        console.print(
            Text(
                f"A batch: {work.num_completions:,} completions of {work.completion_tokens:,} tokens after prompts of "
                f"{work.prompt_tokens:,}, {work.optimizer_steps} optimizer step{'s' * (work.optimizer_steps > 1)}; "
                + "; ".join(
                    f"{role} {part.trained} + {part.scored} microbatches a rank" for role, part in work.roles.items()
                )
                + " (trained + only scored)"
            )
        )
        _print_links(console, rehearsal)
    if rehearsal.times is not None:
        _print_times(console, rehearsal, hardware)
    for title, lines in (
        ("unknown", rehearsal.unknown),
        ("warning", rehearsal.warnings),
        ("refused", rehearsal.refused),
    ):
        for line in lines:
            console.print(Text(f"{title}: {line}"), soft_wrap=True)
    if not rehearsal.refused:
        console.print("nothing is refused")


def as_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """The same as plain data: bytes, seconds, and for each class of ranks their number and the first of them."""
    data = dataclasses.asdict(rehearsal)
    data["shards"] = {
        role: [
            {"num_ranks": len(ranks.ranks), "first_rank": ranks.ranks[0]}
            | {part: getattr(ranks, part) for part in ("parameters", "gradients", "optimizer")}
            for ranks in shards.classes
        ]
        for role, shards in rehearsal.shards.items()
    }
    if rehearsal.times is not None:
        data["times"] |= {"total": rehearsal.times.total, "limit": rehearsal.times.limit}
    return data


def _print_memory(console: Console, rehearsal: Rehearsal) -> None:
    rows = [
        (role, ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in parts.items() if size))
        for role, parts in rehearsal.memory.items()
    ]
    _print(console, "Memory of one rank; of a trainer's, the rank with the largest shards", None, rows)
    rows = []
    for role, shards in rehearsal.shards.items():
        kinds = [f"{len(kind.ranks):,} x {_size(kind.total)}" for kind in shards.classes]
        rows.append((role, f"{len(kinds)} built, one for all ranks with equal shards: {', '.join(kinds)}"))
    _print(console, "Shards: parameters, gradients and optimizer", None, rows)
    loads = [
        (f"{load.num_gpus:,}", " and ".join(load.meshes), _size(load.needed), _size(load.has))
        for load in rehearsal.loads
    ]
    if loads:
        _print(console, "GPUs, with allowances", ("GPUs", "one rank of", "need about", "have"), loads)


def _print_links(console: Console, rehearsal: Rehearsal) -> None:
    rows = []
    for role, links in rehearsal.links.items():
        for name in links.within | links.between:
            within, between, everyone = (part.get(name, 0) for part in (links.within, links.between, links.between_all))
            rows.append((role if role == name else f"{role}: {name}", *map(_sent, (within, between, everyone))))
    columns = ("in a batch", "a rank within its host", "a host to others", "all hosts to others")
    _print(console, "Bytes sent", columns, rows)


def _print_times(console: Console, rehearsal: Rehearsal, hardware: Hardware) -> None:
    times = rehearsal.times
    assert times is not None
    rows = [
        *((name, f"{seconds:.3g}", "") for name, seconds in (times.generate | times.train).items()),
        *((name, f"{seconds:.3g}", "overlaps with a longer one") for name, seconds in times.hidden.items()),
        ("weight sync", f"{times.sync:.3g}", ""),
        ("a batch", f"{times.total:.3g}", "the next one is generated meanwhile" if times.overlaps else ""),
    ]
    _print(console, f"Seconds of a batch on {hardware.name}, by assumption", None, rows)
    console.print(Text(f"limited by {times.limit}", style="bold"))
    reached = ", ".join(f"{share:.0%} of {name}" for name, share in REACHED.items())
    console.print(
        Text(
            f"assumed: {hardware.bfloat16_tflops:g} TFLOP/s in bfloat16, {hardware.float32_tflops:g} in float32, "
            f"{hardware.hbm_gb_s:g} GB/s of memory, {hardware.within_gb_s:g} GB/s of a GPU within its host, "
            f"{hardware.between_gb_s:g} GB/s of a host to others; {reached} reached"
        )
    )


def _print(console: Console, title: str, columns: tuple[str, ...] | None, rows: list[tuple]) -> None:
    table = Table(title=title, title_justify="left", box=box.ROUNDED, show_header=columns is not None)
    for index in range(len(columns or rows[0])):
        numbers = columns is not None and index and all(_is_number(row[index]) for row in rows)
        name = columns[index] if columns is not None else ""
        table.add_column(name, justify="right" if numbers else "left", style="bold" if not index else None)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-|[0-9.,]+( [A-Za-z]+)?", text) is not None


def _seat(seat) -> tuple[str, str]:
    hosts = f"{seat.first}" if seat.first == seat.last else f"{seat.first}-{seat.last}"
    return hosts, "; ".join(seat.meshes) or "nobody"


def _size(num_bytes: int) -> str:
    """`1.25 GiB`, `310 MiB`."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.2f} MiB"


def _sent(num_bytes: int) -> str:
    """`1.25 GB`, `310 MB`, in powers of ten as networks are; `-` for nothing."""
    if not num_bytes:
        return "-"
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.2f} MB"
