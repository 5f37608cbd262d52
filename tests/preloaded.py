"""What the test processes share: imported once, before they are forked."""

import gc
import warnings

import torch

import tests.models
import tests.training

warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
torch.set_num_threads(1)
# What is here lives as long as any of them: their own collections need not go through it, nor copy its pages.
gc.collect()
gc.freeze()
__all__ = ["tests"]
