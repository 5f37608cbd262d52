"""Between backward pass and optimizer step: one norm and one decision for all stages."""

__all__: list[str] = []
