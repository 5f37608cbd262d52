"""A thread beside each rank's work that answers for it: what it is at, whether the job still moves, whether it is over.

A rank that is stuck in the user's code cannot answer, and those that wait for it know only that nothing comes. So the
threads tell each other through the job's store: where nothing has moved for long, one of them prints what each rank is
at; and where the job has failed and a rank never looks up to see it, its thread ends the process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from lightning_pp.launch import failure
from lightning_pp.launch.whereabouts import Place

__all__: list[str] = []

#: how long a process may take to end after the job has failed, seconds
_GRACE = 10.0
#: how long the one that reports waits for the others to answer, in looks
_ANSWERS = 4
_NAMES = ("rank", "stage", "op", "micro-batch", "waits for", "since", "at")


@dataclass(frozen=True, slots=True)
class Watched:
    """What a watcher asks of its process.

    Attributes:
        place: Where the process is.
        is_failing: Whether it is dealing with a failure already.
        dead_child: Says which of the processes that it has started has ended badly, if any.
    """

    place: Callable[[], Place]
    is_failing: Callable[[], bool]
    dead_child: Callable[[], str | None]


class Watcher:
    """Watches one process of a job while a Trainer runs.

    Args:
        store: The job's.
        rank: This process's global rank.
        size: Number of processes.
        timeout: How long ranks wait for each other, seconds; a report comes after half of that.
        watched: The process.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, watched: Watched) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._watched = watched
        self._interval = min(max(timeout / 20, 0.1), 2.0)
        self._prefix = f"lightning_pp/watch/{store.add(f'lightning_pp/watches/{rank}', 1)}"
        self._stop = threading.Event()
        self._place = watched.place()
        self._since = time.monotonic()
        self._reports = 0
        self._has_reported = False
        self._over_since: float | None = None
        self._is_released = False
        self._thread = threading.Thread(target=self._run, name="lightning_pp watcher", daemon=True)
        self._thread.start()

    def stop(self, has_failed: bool) -> None:
        """The run is over here. After a good end, rank 0 stays until no watcher would miss the store it holds."""
        self._stop.set()
        self._thread.join(self._interval)
        if has_failed:
            return
        try:
            self._release()
            keys = [f"{self._prefix}/released/{rank}" for rank in range(self._size)]
            deadline = time.monotonic() + 2 * self._interval
            while self._rank == 0 and time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(0.01)
        except (RuntimeError, ValueError):
            pass

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._look()
            try:
                self._ask()
            except (RuntimeError, ValueError):  # the process that held the store is gone
                self._note_end(not self._is_released)
            if self._is_overdue():
                self._end()

    def _look(self) -> None:
        place = self._watched.place()
        if place.progress != self._place.progress:
            self._since, self._has_reported = time.monotonic(), False
        self._place = place

    def _ask(self) -> None:
        """Everything for which the others are asked."""
        dead = self._watched.dead_child()
        if dead is not None:
            failure.leave_text(self._store, dead)
        self._note_end(failure.is_over(self._store))
        if not self._is_released and self._store.check([f"{self._prefix}/released/0"]):
            self._release()
        key = f"{self._prefix}/stall/{self._reports}"
        stands = time.monotonic() - self._since
        is_first = False
        if stands > self._timeout / 2 and not self._has_reported and not self._store.check([key]):
            is_first = bytes(self._store.compare_set(key, "", str(self._rank))).decode() == str(self._rank)
        if self._store.check([key]):
            self._answer(key, stands)
            if is_first:
                self._report(key)

    def _answer(self, key: str, stands: float) -> None:
        self._reports += 1
        self._has_reported = True
        answer = {**asdict(self._place), "progress": None, "stands": stands}
        self._store.set(f"{key}/{self._rank}", json.dumps(answer))

    def _report(self, key: str) -> None:
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + _ANSWERS * self._interval
        while time.monotonic() < deadline and not self._store.check(keys):
            time.sleep(self._interval / 4)
        answers = {
            rank: json.loads(bytes(self._store.get(name)))
            for rank, name in enumerate(keys)
            if self._store.check([name])
        }
        text, culprit = report(answers, self._size, self._timeout)
        _say(text)
        if culprit:
            failure.leave_suspicion(self._store, culprit)

    def _release(self) -> None:
        """From here on the store may go without anything being wrong."""
        self._is_released = True
        self._store.set(f"{self._prefix}/released/{self._rank}", "")

    def _note_end(self, is_over: bool) -> None:
        if is_over and self._over_since is None:
            self._over_since = time.monotonic()

    def _is_overdue(self) -> bool:
        if self._over_since is None or self._watched.is_failing() or self._stop.is_set():
            return False
        return time.monotonic() - self._over_since > _GRACE

    def _end(self) -> None:
        end_process(
            f"[rank {self._rank}] The job has failed, and this process is still at {self._place.at}. It ends now.\n"
        )


def end_process(text: str) -> NoReturn:
    """End this process, whatever it is at, and its loaders' workers: those of a fork server do not see it end."""
    _say(text)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def report(answers: dict[int, dict[str, Any]], size: int, timeout: float) -> tuple[str, str | None]:
    """A table of what each rank is at, and the rank that nobody keeps, as a failure would be told."""
    rows = [_NAMES]
    suspects = []
    for rank in range(size):
        found = answers.get(rank)
        if found is None:
            rows.append((str(rank), "", "", "", "", "", "does not answer"))
            suspects.append(f"rank {rank}: does not answer")
            continue
        since = f"{found['stands']:.0f} s"
        rows.append(
            (str(rank), str(found["stage"]), found["op"], found["micro_batch"], found["waits_for"], since, found["at"])
        )
        if not found["waits_for"]:
            suspects.append(f"rank {rank}: stalled in {found['op'] or 'no op'} at {found['at']}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(_NAMES))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    longest = max((found["stands"] for found in answers.values()), default=0.0)
    text = (
        f"No step has got on for {longest:.0f} s; ranks wait for each other for {timeout:.0f} s. Where each rank is:\n"
    )
    text += "\n".join(lines)
    culprit = suspects[0] if len(suspects) == 1 else None
    return text + (f"\nOne rank waits for no other. {culprit}\n" if culprit else "\n"), culprit


def _say(text: str) -> None:
    """In one piece: all processes write to the same place."""
    os.write(2, text.encode())
