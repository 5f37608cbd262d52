"""torchmetrics objects in a module whose steps end on the last stage."""

__all__: list[str] = []
