"""torch's FlexAttention, compiled: a window over documents of different lengths."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

attend = torch.compile(flex_attention)
documents = torch.arange(1024, device="cuda") // 256
mask = create_block_mask(lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), None, None, 1024, 1024)
project, output = nn.Linear(512, 1536).cuda(), nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW([*project.parameters(), *output.parameters()])
for _ in range(3):
    x = torch.randn(2, 1024, 512, device="cuda")
    heads = project(x).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
    output(attend(*heads, block_mask=mask).transpose(1, 2).flatten(-2)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
