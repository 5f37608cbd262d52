"""Saving and loading: one ordinary file or a folder, whole or not at all."""

__all__: list[str] = []
