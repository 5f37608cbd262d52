"""The command line, ``python -m lightning_pp``: looks at pipelines without running one.

A subcommand is a function that adds its arguments and names the function that answers it; ``COMMANDS`` lists
them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from .schedule import SCHEDULES, Costs, Schedule, Timeline, build, grid, held, phases, placement_of, simulate, ticks
from .schedule.costsfile import read_costs
from .schedule.picture import Picture, panel_of
from .schedule.svg import to_svg

__all__: list[str] = []


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


_Subparsers = argparse._SubParsersAction  # the type of what add_subparsers returns; argparse has no public name for it


def _add_schedule(subparsers: _Subparsers[_Parser]) -> None:
    parser = subparsers.add_parser("schedule", help="draw a schedule and say what it costs")
    parser.add_argument(
        "--schedule",
        action="append",
        help=f"a name ({', '.join(SCHEDULES)}) or a CSV file; default 1f1b. Several with --compare",
    )
    parser.add_argument("--compare", action="store_true", help="one table of several schedules; default all names")
    parser.add_argument("--stages", type=int, required=True, help="number of ranks in the pipeline")
    parser.add_argument("--microbatches", type=int, required=True, help="number of micro-batches in a batch")
    parser.add_argument("--forward", type=float, help="time of a forward; default 1")
    parser.add_argument("--backward", type=float, help="time of a full backward; default 1")
    parser.add_argument("--input", type=float, help="time of an input gradient (I); default that of a forward")
    parser.add_argument("--weight", type=float, help="time of a weight gradient (W); default that of a forward")
    parser.add_argument("--transfer", type=float, help="time of a message; default 0")
    parser.add_argument("--costs", metavar="FILE", help="times per stage from a JSON or CSV file, instead of those")
    parser.add_argument(
        "--columns", type=int, help="most columns of a line; default: as the terminal has, if it is one"
    )
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.add_argument("--png", metavar="FILE", help="write a picture; needs matplotlib")
    parser.add_argument("--trace", type=int, metavar="RANK", help="list what this rank holds, tick by tick")
    parser.set_defaults(answer=_schedule)


def _schedule(args: argparse.Namespace) -> str:
    """Answers ``schedule``: grid, counts per rank, makespan, bubble, and the trace of a rank if asked for."""
    if args.compare and args.trace is not None:
        raise ValueError("--trace is about one schedule: leave out --compare")
    names = args.schedule or (list(SCHEDULES) if args.compare else ["1f1b"])
    if len(names) > 1 and not args.compare:
        raise ValueError(f"{len(names)} schedules: add --compare for a table of them, or give one")
    schedules = {name: build(name, args.stages, args.microbatches) for name in names}
    costs = _costs(args, len(placement_of(schedules[names[0]])))
    timelines = {name: simulate(schedule, costs) for name, schedule in schedules.items()}
    parts = [_comparison(timelines)] if args.compare else []
    for name, schedule in {} if args.compare else schedules.items():
        parts += [grid(schedule, costs, _columns(args)), _counts(schedule, timelines[name])]
        parts.append(_totals(args, timelines[name]))
        if args.trace is not None:
            parts.append(_trace(schedule, args.trace, costs))
    _draw(args, timelines)
    return "\n\n".join(parts)


def _columns(args: argparse.Namespace) -> int | None:
    """How wide a line may be; a file or a program gets each rank in one."""
    if args.columns is not None:
        if args.columns < 1:
            raise ValueError(f"--columns {args.columns}: a whole number of at least 1 is wanted")
        return int(args.columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return None


def _costs(args: argparse.Namespace, num_stages: int) -> Costs:
    names = ("forward", "backward", "input", "weight", "transfer")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.costs is not None:
        if given:
            raise ValueError(f"give costs by --costs or by --{next(iter(given))}, not by both")
        return read_costs(args.costs, num_stages)
    forward = given.get("forward", 1.0)
    return Costs(**{"forward": forward, "backward": 1.0, "input": forward, "weight": forward, **given})


def _comparison(timelines: Mapping[str, Timeline]) -> str:
    width = max(len("schedule"), *map(len, timelines))
    lines = [f"{'schedule':<{width}}  makespan  bubble  in flight by rank"]
    for name, timeline in timelines.items():
        held = " ".join(str(timeline.in_flight[rank]) for rank in range(timeline.num_ranks))
        lines.append(f"{name:<{width}}  {timeline.makespan:>8g}  {timeline.bubble_fraction:.4f}  {held}")
    return "\n".join(lines)


def _draw(args: argparse.Namespace, timelines: Mapping[str, Timeline]) -> None:
    """Writes the pictures that are asked for."""
    if args.svg is None and args.png is None:
        return
    titles = {
        name: f"{name}: makespan {timeline.makespan:g}, bubble {timeline.bubble_fraction:.4f}"
        for name, timeline in timelines.items()
    }
    picture = Picture([panel_of(timeline, titles[name]) for name, timeline in timelines.items()])
    try:
        if args.png is not None:
            from .callbacks.png import write_png  # needs what few have

            write_png(picture, args.png)
        if args.svg is not None:
            with open(args.svg, "w", encoding="utf-8") as file:
                file.write(to_svg(picture))
    except (OSError, ImportError) as error:
        raise ValueError(f"cannot write a picture: {error}") from error


def _counts(schedule: Schedule, timeline: Timeline) -> str:
    lines = ["rank  warm-up  steady  cooldown  in flight  bubble"]
    for rank, parts in phases(schedule).items():
        lines.append(
            f"{rank:>4}  {parts.warm_up:>7}  {parts.steady:>6}  {parts.cooldown:>8}  "
            f"{timeline.in_flight[rank]:>9}  {timeline.bubble_fractions[rank]:.4f}"
        )
    return "\n".join(lines)


def _totals(args: argparse.Namespace, timeline: Timeline) -> str:
    ranks, mbs = args.stages, args.microbatches
    closed = (ranks - 1) / (mbs + ranks - 1)
    return (
        f"makespan {timeline.makespan:g}\n"
        f"bubble   {timeline.bubble_fraction:.4f}, "
        f"closed form (P-1)/(M+P-1) = {ranks - 1}/{mbs + ranks - 1} = {closed:.4f}"
    )


def _trace(schedule: Schedule, rank: int, costs: Costs) -> str:
    sets = held(schedule, rank, costs)
    lines = [f"rank {rank} holds the activations of"]
    for tick, (op, holding) in enumerate(zip(ticks(schedule, costs)[rank], sets, strict=True)):
        names = " ".join(f"{stage}F{mb}" for stage, mb in sorted(holding))
        lines.append(f"tick {tick:>3}  {op or '.'!s:<6} {len(holding):>3}  {names}".rstrip())
    return "\n".join(lines)


def _add_plan(subparsers: _Subparsers[_Parser]) -> None:
    from .planning.command import add_plan  # needs torch, which schedules do not

    add_plan(subparsers)


COMMANDS: tuple[Callable[[_Subparsers[_Parser]], None], ...] = (_add_schedule, _add_plan)
"""The functions that add the subcommands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments after the program's name. Default: those of the process.

    Returns:
        0 on success. A wrong argument is one line on stderr and ends the process with exit code 2.
    """
    parser = _Parser(prog="python -m lightning_pp", description="Looks at pipelines without running one.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in COMMANDS:
        add(subparsers)
    args = parser.parse_args(argv)
    try:
        print(args.answer(args))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
