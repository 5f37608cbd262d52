"""One step of the user's module: from batch to job, and from results to what Lightning expects."""

__all__: list[str] = []
