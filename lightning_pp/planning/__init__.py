"""What a model will need and how fast it will be, before there are machines: ``python -m lightning_pp plan``."""

__all__: list[str] = []
