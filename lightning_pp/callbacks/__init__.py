"""What can be seen of a run."""

__all__: list[str] = []
