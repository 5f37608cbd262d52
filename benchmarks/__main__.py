"""``python -m benchmarks [--quick] [--only NAME ...]``: measures, and prints tables in Markdown."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import lightning
import torch

from benchmarks import claims, gpt, overhead, sleeping

Row = Sequence[object]


def _sleeping(quick: bool) -> Iterator[Row]:
    yield ("P, M, forward/backward ms, activation", *sleeping.NAMES)
    for case in sleeping.CASES:
        found = sleeping.measure(case, rounds=1 if quick else 3)
        size = f"{case.width * 4:,} B"
        yield (
            f"{case.stages}, {case.microbatches}, {case.forward:g}/{case.backward:g}, {size}",
            *(_spread(found[name]) for name in sleeping.NAMES),
        )


def _gpt(quick: bool) -> Iterator[Row]:
    yield ("P, M", *(f"{name} / ideal" for name in gpt.NAMES), "1f1b / torch", "ideal, s")
    for case in gpt.CASES[:1] if quick else gpt.CASES:
        found = gpt.measure(case, rounds=1 if quick else 2)
        middle = {name: statistics.median(values) for name, values in found.items()}
        yield (
            f"{case.stages}, {case.microbatches}",
            *(f"{middle[name] / middle['ideal']:.3f}" for name in gpt.NAMES),
            f"{middle['1f1b'] / middle['torch 1F1B']:.3f}",
            f"{middle['ideal']:.2f}",
        )


def _overhead(quick: bool) -> Iterator[Row]:
    yield ("one stage", "torch 1F1B", "1f1b")
    found = overhead.per_micro_batch(rounds=3 if quick else 8)
    yield ("microseconds per micro-batch over a plain loop", *(_spread(found[name], "{:.0f}") for name in found))
    batches = overhead.whole_batch(rounds=2 if quick else 4)
    plain, own = (statistics.median(values) for values in batches.values())
    yield ("batch of the GPT over the plain Trainer's, M = 1", "-", f"{own / plain:.4f}")


def _monitors(quick: bool) -> Iterator[Row]:
    found = overhead.monitors(rounds=1 if quick else 4)
    yield ("GPT, P = 2, M = 8, measured in every batch", *found)
    middle = [statistics.median(values) for values in found.values()]
    yield ("batch over the batch without", *(f"{one / middle[0]:.4f}" for one in middle))


def _memory(quick: bool) -> Iterator[Row]:
    yield ("schedule, P = 4", "M", "bytes held for backward, peak", "messages buffered, peak")
    for schedule in ("gpipe", "1f1b", "eager_1f1b"):
        for number in (8, 64) if quick else (8, 32, 64, 256):
            run = claims.bubble_and_memory(schedule, number, (1, 2))
            yield (schedule, number, f"{run.peak_bytes:,.0f}", f"{run.buffers:.0f}")


def _bubble(quick: bool) -> Iterator[Row]:
    times = (10, 20) if quick else (40, 80)
    yield (f"P = 4, forward/backward {times[0]}/{times[1]} ms", "M", "bubble measured", "closed form", "bytes held")
    for schedule, number in (("1f1b", 8), ("1f1b", 400), ("eager_1f1b", 400)):
        run = claims.bubble_and_memory(schedule, number, times)
        yield (schedule, number, f"{run.bubble:.2%}", f"{run.closed_form:.2%}", f"{run.peak_bytes:,.0f}")


def _delay(quick: bool) -> Iterator[Row]:
    found = claims.delayed(rounds=1)
    yield ("every link 0.1 F slower, P = 4, M = 64", *found)
    yield ("step over the step without", *(_spread(values) for values in found.values()))


def _glue(quick: bool) -> Iterator[Row]:
    yield ("48-layer transformer, last of 4 stages", "share of the stage's forward")
    yield ("glue run again, layers of other stages answered", f"{claims.glue():.2%}")


BENCHMARKS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "sleeping": _sleeping,
    "gpt": _gpt,
    "overhead": _overhead,
    "monitors": _monitors,
    "memory": _memory,
    "bubble": _bubble,
    "delay": _delay,
    "glue": _glue,
}


def _spread(values: Sequence[float], form: str = "{:.3f}") -> str:
    """The median, and the quickest and slowest."""
    return f"{form} ({form} to {form})".format(statistics.median(values), min(values), max(values))


def _machine() -> str:
    name = platform.processor() or platform.machine()
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    return f"{name}, {os.cpu_count()} cores, Gloo, one thread per process; {versions}"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under five minutes on two cores")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    start = time.monotonic()
    print(_machine())
    for name in arguments.only:
        print(f"\n## {name}\n")
        for index, row in enumerate(BENCHMARKS[name](arguments.quick)):
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            if not index:
                print(f"|{' --- |' * len(row)}", flush=True)
    print(f"\n{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
