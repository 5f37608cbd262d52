"""Saving after a failure, which all processes must do together: they find out first whether all of them are there.

A rank that fails alone leaves the others waiting for it in the middle of a step. It must go soon, so that they learn of
it, and not wait for a gathering that cannot take place.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from lightning_pp.saving.courier import WRITER, Courier

__all__: list[str] = []

#: how long ranks that have failed wait for others that may have failed too, seconds
_PATIENCE = 4.0
_TIMEOUT = timedelta(seconds=60)
_GO = "go"


class Meeting:
    """Where the ranks of one run meet after a failure.

    Args:
        store: The job's.
        session: Names the run; the same on all ranks.
        rank: This process's global rank.
        size: Number of processes.
    """

    def __init__(self, store: Any, session: str, rank: int, size: int) -> None:
        self._store = store
        self._session = session
        self._rank = rank
        self._size = size
        self._attempts = 0
        self.reason: str | None = None

    def courier(self, place: str, timeout: timedelta) -> Courier | None:
        """Connections to all ranks if they have come and stopped at the same place; else ``reason`` says why not.

        Args:
            place: Where in training this rank has stopped.
            timeout: How long ranks wait for each other once they have met.
        """
        if self.reason is None:
            self._attempts += 1
            name = f"{self._session}/{self._attempts}"
            try:
                answer = self._agree(f"lightning_pp/{name}", place)
                if answer == _GO:
                    return Courier(name, self._rank, self._size, min(timeout, _TIMEOUT))
                self.reason = answer
            except (RuntimeError, ValueError) as error:
                self.reason = f"the processes are no longer connected ({error})"
        return None

    def _agree(self, prefix: str, place: str) -> str:
        store, decision = self._store, f"{prefix}/decision"
        keys = [f"{prefix}/{rank}" for rank in range(self._size)]
        store.set(keys[self._rank], place)
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and not store.check([decision]):
            if self._rank == WRITER and store.check(keys):
                is_same = len({bytes(store.get(key)) for key in keys}) == 1
                store.compare_set(decision, "", _GO if is_same else "the processes have stopped at different steps")
            else:
                time.sleep(0.02)
        # whoever is the first to lose patience decides for all
        return bytes(store.compare_set(decision, "", "not all processes have stopped")).decode()
