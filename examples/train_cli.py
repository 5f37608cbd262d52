"""Train the GPT of ``train_gpt.py`` from a YAML file, with Lightning's own command line.

    python examples/train_cli.py fit --config examples/config.yaml
    python examples/train_cli.py fit --config examples/config.yaml --trainer.strategy.microbatches=16

The strategy, its stages and its micro-batches are lines of the file; no line of this script knows of a pipeline.
"""

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from train_gpt import CharGPT, Windows, encode, read_text


class HelpTopics(LightningDataModule):
    """Python's own help text, in windows of characters.

    Args:
        batch_size: Windows in a batch.
        context: Characters in a window.
    """

    def __init__(self, batch_size: int = 64, context: int = 32) -> None:
        super().__init__()
        self.batch_size, self.context = batch_size, context
        text = read_text()
        self.alphabet = "".join(sorted(set(text)))
        chars = encode(text, self.alphabet)
        cut = len(chars) * 95 // 100
        self.train, self.val = Windows(chars[:cut], context), Windows(chars[cut:], context)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val, self.batch_size)


class CLI(LightningCLI):
    """The model's alphabet and context are those of the text."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.alphabet", "model.alphabet", apply_on="instantiate")
        parser.link_arguments("data.context", "model.context")
        parser.link_arguments("trainer.max_steps", "model.steps")


def main() -> None:
    torch.set_num_threads(1)
    CLI(CharGPT, HelpTopics)


if __name__ == "__main__":
    main()
