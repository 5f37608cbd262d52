"""The processes of a job: how they start, where each stands, how they stop."""

__all__: list[str] = []
