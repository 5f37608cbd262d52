"""Which rank is which stage of which replica: stages outermost, ``rank = stage * num_replicas + replica``."""

from __future__ import annotations

from dataclasses import dataclass

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Mesh:
    """The position of one process.

    Attributes:
        rank: Global rank of this process.
        num_stages: Pipeline depth in ranks.
        num_replicas: Number of pipelines that train side by side.
    """

    rank: int
    num_stages: int
    num_replicas: int = 1

    @property
    def position(self) -> int:
        """This process's place in its pipeline, 0 for the first."""
        return self.rank // self.num_replicas

    @property
    def replica(self) -> int:
        """The pipeline that this process belongs to."""
        return self.rank % self.num_replicas

    @property
    def pipeline(self) -> list[int]:
        """Global ranks of this process's pipeline, by position."""
        return [self.global_rank(position) for position in range(self.num_stages)]

    @property
    def replicas(self) -> list[int]:
        """Global ranks of the processes at this position, by pipeline."""
        first = self.position * self.num_replicas
        return list(range(first, first + self.num_replicas))

    def global_rank(self, position: int) -> int:
        """The global rank at ``position`` of this process's own pipeline."""
        return position * self.num_replicas + self.replica
