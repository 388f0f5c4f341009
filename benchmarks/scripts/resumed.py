"""Training is saved, read again from the file onto the card, and goes on."""

import tempfile
from pathlib import Path

import torch
from torch import nn


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    model = nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048)).cuda()
    return model, torch.optim.Adam(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take two steps."""
    for _ in range(2):
        model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


model, optimizer = make()
train(model, optimizer)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    model, optimizer = make()
    saved = torch.load(file, map_location="cuda")
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
train(model, optimizer)
