"""Image models as their users write them: a diffusion U-Net, autoencoders, early exits, stochastic depth, a GAN."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def noise_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(channels: int = 1, samples: int = 13) -> DataLoader[Any]:
    source = noise_of(3)
    pictures = torch.rand(samples, channels, 8, 8, generator=source)
    return DataLoader(TensorDataset(pictures, torch.randint(0, 3, (samples,), generator=source)), batch_size=7)


class TimeEmbedding(nn.Module):
    """Sines of the time, and a small network on them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.register_buffer("rates", torch.exp(-math.log(100.0) * torch.arange(width // 2) / (width // 2)))

    def forward(self, time: Tensor) -> Tensor:
        angles = time[:, None] * self.rates
        return self.net(torch.cat([angles.sin(), angles.cos()], 1))


class ResidualBlock(nn.Module):
    def __init__(self, entering: int, leaving: int, time: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, entering)
        self.first = nn.Conv2d(entering, leaving, 3, padding=1)
        self.time = nn.Linear(time, leaving)
        self.second = nn.Conv2d(leaving, leaving, 3, padding=1)
        self.skip = nn.Conv2d(entering, leaving, 1) if entering != leaving else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(F.silu(h))


class DenoisingUNet(nn.Module):
    """Two levels with long skips; every block is told the time."""

    def __init__(self, width: int = 4, time: int = 6) -> None:
        super().__init__()
        self.time = TimeEmbedding(time)
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList([ResidualBlock(width, width, time), ResidualBlock(width, 2 * width, time)])
        self.shrink = nn.AvgPool2d(2)
        self.middle = ResidualBlock(2 * width, 2 * width, time)
        self.up = nn.ModuleList([ResidualBlock(4 * width, width, time), ResidualBlock(2 * width, width, time)])
        self.grow = nn.Upsample(scale_factor=2)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        embedded = self.time(time)
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x, embedded)
            skips.append(x)
            x = self.shrink(x)
        x = self.middle(x, embedded)
        for block in self.up:
            x = block(torch.cat([self.grow(x), skips.pop()], 1), embedded)
        return self.leave(x)


class Diffusion(LightningModule):
    """DDPM: times and noise are drawn in the step; the noise is a part of the input and the target."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = DenoisingUNet()
        betas = torch.linspace(1e-3, 0.3, 10)
        self.register_buffer("kept", torch.cumprod(1 - betas, 0))

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.randint(0, len(self.kept), (len(x),)), torch.randn_like(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] * 2 - 1
        time, noise = self.draw(x)
        kept = self.kept[time][:, None, None, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        loss = F.mse_loss(self.unet(noisy, time), noise)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    loader = staticmethod(images)


def fixed_noise(x: Tensor) -> Tensor:
    """As good as noise, but the same in every run."""
    return torch.sin(1e3 * x + torch.arange(x[0].numel()).reshape(x[0].shape))


class FixedDiffusion(Diffusion):
    """Without a generator, so that the numbers are those of the plain run."""

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.flatten(1).sum(1) * 50).long() % len(self.kept), fixed_noise(x)


class VAE(LightningModule):
    """Reconstruction and Kullback-Leibler divergence; draws between encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.GELU())
        self.mean = nn.Linear(12, 4)
        self.log_variance = nn.Linear(12, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.GELU(), nn.Linear(12, 64), nn.Sigmoid())

    def draw(self, mean: Tensor) -> Tensor:
        return torch.randn_like(mean)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, _ = batch
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + (0.5 * log_variance).exp() * self.draw(mean)
        reconstruction = F.binary_cross_entropy(self.decoder(z), x.flatten(1), reduction="none").sum(1).mean()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        self.log_dict({"reconstruction": reconstruction, "divergence": divergence}, on_step=False, on_epoch=True)
        return {"loss": reconstruction + 0.1 * divergence, "divergence": divergence.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    loader = staticmethod(images)


class FixedVAE(VAE):
    def draw(self, mean: Tensor) -> Tensor:
        return fixed_noise(torch.ones_like(mean))


class TiedAutoencoder(LightningModule):
    """The decoder is the encoder transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(64, 16), nn.Linear(16, 12), nn.Linear(12, 8), nn.Linear(8, 4)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (8, 12, 16, 64)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        h = x
        for layer in self.encoder:
            h = torch.tanh(layer(h))
        for layer, bias in zip(reversed(self.encoder), self.biases, strict=True):
            h = torch.tanh(F.linear(h, layer.weight.t(), bias))
        loss = F.mse_loss(h, x)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    loader = staticmethod(images)


class Transposed(nn.Module):
    """A layer with the weight of another one."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight
        self.bias = nn.Parameter(torch.zeros(other.in_features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight.t(), self.bias))


class TiedLayersAutoencoder(TiedAutoencoder):
    """The same with layers for both directions: every weight lies on two stages."""

    def __init__(self) -> None:
        super().__init__()
        del self.biases
        self.decoder = nn.ModuleList([Transposed(layer) for layer in reversed(self.encoder)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        h = x
        for layer in self.encoder:
            h = torch.tanh(layer(h))
        for layer in self.decoder:
            h = layer(h)
        return F.mse_loss(h, x)


class DeepSupervision(LightningModule):
    """A classifier after every block; all of their losses count."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU()) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, label = batch
        h = self.enter(x)
        total = h.new_zeros(())
        for depth, (block, leave) in enumerate(zip(self.blocks, self.exits, strict=True), start=1):
            h = h + block(h)
            loss = F.cross_entropy(leave(h.mean((2, 3))), label)
            self.log(f"loss_{depth}", loss)
            total = total + depth * loss
        return total / 6

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    loader = staticmethod(images)


class DropPath(nn.Module):
    """Stochastic depth: drops the branch of some samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return branch
        keep = torch.rand(len(branch), *[1] * (branch.ndim - 1), dtype=branch.dtype) >= self.rate
        return branch * keep / (1 - self.rate)


class Branch(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(F.silu(self.conv(x)))


class StochasticDepth(LightningModule):
    rate = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(*[Branch(self.rate * depth / 4) for depth in range(4)])
        self.leave = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, label = batch
        loss = F.cross_entropy(self.leave(self.blocks(self.enter(x)).mean((2, 3))), label)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    loader = staticmethod(images)


class FullDepth(StochasticDepth):
    rate = 0.0


class LayerDrop(StochasticDepth):
    """Draws which blocks a step runs at all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.enter(batch[0])
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                h = block(h)
        return F.cross_entropy(self.leave(h.mean((2, 3))), batch[1])


class GAN(LightningModule):
    """Two optimizers, which Lightning has only with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self.generator(torch.randn(len(batch[0]), 4))
        loss = -self.discriminator(made).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        loss = self.discriminator(made.detach()).mean() - self.discriminator(batch[0].flatten(1)).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters()) for net in (self.generator, self.discriminator)]

    loader = staticmethod(images)
