"""What the test processes share: imported once, before they are forked."""

import warnings

import torch

import tests.models
import tests.training

warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
torch.set_num_threads(1)
__all__ = ["tests"]
