"""Lightning's own callbacks, fitted to a model whose stages lie on several processes."""

__all__: list[str] = []
