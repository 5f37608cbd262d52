"""The command line, ``python -m lightning_pp``: looks at pipelines without running one.

A subcommand is a function that adds its arguments and names the function that answers it; ``COMMANDS`` lists
them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .schedule import SCHEDULES, Costs, Schedule, Timeline, build, grid, held, phases, simulate, ticks

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
        default="1f1b",
        help=f"a name ({', '.join(SCHEDULES)}) or a CSV file; default %(default)s",
    )
    parser.add_argument("--stages", type=int, required=True, help="number of ranks in the pipeline")
    parser.add_argument("--microbatches", type=int, required=True, help="number of micro-batches in a batch")
    parser.add_argument("--forward", type=float, default=1.0, help="time of a forward; default %(default)s")
    parser.add_argument("--backward", type=float, default=1.0, help="time of a full backward; default %(default)s")
    parser.add_argument("--input", type=float, help="time of an input gradient (I); default that of a forward")
    parser.add_argument("--weight", type=float, help="time of a weight gradient (W); default that of a forward")
    parser.add_argument("--transfer", type=float, default=0.0, help="time of a message; default %(default)s")
    parser.add_argument("--trace", type=int, metavar="RANK", help="list what this rank holds, tick by tick")
    parser.set_defaults(answer=_schedule)


def _schedule(args: argparse.Namespace) -> str:
    """Answers ``schedule``: grid, counts per rank, makespan, bubble, and the trace of a rank if asked for."""
    schedule = build(args.schedule, args.stages, args.microbatches)
    costs = Costs(
        forward=args.forward,
        backward=args.backward,
        input=args.forward if args.input is None else args.input,
        weight=args.forward if args.weight is None else args.weight,
        transfer=args.transfer,
    )
    timeline = simulate(schedule, costs)
    parts = [grid(schedule, costs), _counts(schedule, timeline), _totals(args, timeline)]
    if args.trace is not None:
        parts.append(_trace(schedule, args.trace, costs))
    return "\n\n".join(parts)


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


COMMANDS: tuple[Callable[[_Subparsers[_Parser]], None], ...] = (_add_schedule,)
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
