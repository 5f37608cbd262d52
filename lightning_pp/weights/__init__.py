"""Parameters and buffers: which process holds what, and where their values come from."""

__all__: list[str] = []
