"""Two models against each other: a generator of transposed convolutions and a discriminator, a penalty of gradients."""

import torch
from torch import nn


def up(inputs: int, outputs: int) -> nn.Sequential:
    """Return a layer that doubles width and height."""
    return nn.Sequential(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU())


def down(inputs: int, outputs: int) -> nn.Sequential:
    """Return a layer that halves width and height."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 4, 2, 1), nn.GroupNorm(8, outputs), nn.LeakyReLU(0.2))


last = nn.ConvTranspose2d(128, 3, 4, 2, 1)
generator = nn.Sequential(up(128, 512), up(512, 256), up(256, 128), last, nn.Tanh()).cuda()
judge = nn.Sequential(down(3, 64), down(64, 128), down(128, 256), nn.Flatten(), nn.Linear(256 * 64, 1)).cuda()
optimizers = [torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (generator, judge)]
for _ in range(3):
    images, seeds = torch.rand(16, 3, 64, 64, device="cuda"), torch.randn(16, 128, 4, 4, device="cuda")
    made = generator(seeds)
    mixed = (images + made.detach()).div(2).requires_grad_()
    [gradient] = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
    penalty = 10 * (gradient.norm(2, dim=(1, 2, 3)) - 1).square().mean()
    loss = judge(made.detach()).mean() - judge(images).mean() + penalty
    optimizers[1].zero_grad()
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    (-judge(generator(seeds)).mean()).backward()
    optimizers[0].step()
