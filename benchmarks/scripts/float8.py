"""torchao's float8 training: linear layers compute in float8, compiled or not: float8.py eager|compiled."""

import sys

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

layers = [nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
model = convert_to_float8_training(nn.Sequential(*layers).to("cuda", torch.bfloat16))
run = torch.compile(model) if sys.argv[1] == "compiled" else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _ in range(3):
    run(torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
