"""Pipeline parallelism for PyTorch Lightning: an unchanged LightningModule, cut into stages."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pp.callbacks.bubble import BubbleMonitor as BubbleMonitor
from lightning_pp.callbacks.memory import ActivationMemoryMonitor as ActivationMemoryMonitor
from lightning_pp.callbacks.timeline import PipelineTimeline as PipelineTimeline
from lightning_pp.strategy import PipelineStrategy as PipelineStrategy

__all__ = ["ActivationMemoryMonitor", "BubbleMonitor", "PipelineStrategy", "PipelineTimeline"]

if PipelineStrategy.strategy_name not in StrategyRegistry:
    PipelineStrategy.register_strategies(StrategyRegistry)
