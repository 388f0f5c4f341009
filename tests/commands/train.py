"""A training script in the style of nanoGPT: the same data whatever the micro-batch, and a loss that accumulates."""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--mean_of_means", action="store_true")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--out", default="model.pt")
parser.add_argument("--config")
given = parser.parse_args()
if given.config:
    config = json.loads(Path(given.config).read_text())
    given.batch, given.accumulate = config["train"]["micro_batch_size"], config["train"]["gradient_accumulation_steps"]
    given.dtype = config["dtype"]

VOCABULARY, LENGTH, WIDTH, EFFECTIVE = 512, 64, 64, given.batch * given.accumulate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.feed_forward(x)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layers = [nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randint(VOCABULARY, (given.steps * EFFECTIVE, LENGTH + 1), generator=torch.Generator().manual_seed(1))
lengths = torch.randint(8, LENGTH + 1, (len(data),), generator=torch.Generator().manual_seed(2))
targets = data[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)
autocast = torch.autocast(device, torch.bfloat16) if given.dtype == "bf16" else nullcontext()

for step in range(given.steps):
    rows = slice(step * EFFECTIVE, (step + 1) * EFFECTIVE)
    num_targets = (targets[rows] != -100).sum().item()
    for x, y in zip(data[rows, :-1].split(given.batch), targets[rows].split(given.batch), strict=True):
        with autocast:
            logits = model(x.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten().to(device), reduction="sum")
        weight = given.accumulate * (y != -100).sum().item() if given.mean_of_means else num_targets
        (loss / weight).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), given.out)
