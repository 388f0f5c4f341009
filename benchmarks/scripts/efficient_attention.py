"""A transformer whose attention is that of xFormers, which keeps the documents of a row apart."""

import torch
from torch import nn
from xformers.ops import memory_efficient_attention
from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

WIDTH, HEADS, LENGTHS = 1024, 16, [1500, 2596]


class Block(nn.Module):
    """Attention within each document, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.projections, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, documents):
        """Return the rows after this block."""
        q, k, v = self.projections(self.norms[0](x)).view(1, -1, 3, HEADS, WIDTH // HEADS).unbind(2)
        attended = memory_efficient_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), attn_bias=documents)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.feed_forward(self.norms[1](x))


embedding, head = nn.Embedding(32000, WIDTH).cuda(), nn.Linear(WIDTH, 32000).cuda()
blocks = nn.ModuleList([Block() for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW([*embedding.parameters(), *blocks.parameters(), *head.parameters()], fused=True)
documents = BlockDiagonalCausalMask.from_seqlens(LENGTHS, device="cuda")
for _ in range(3):
    tokens = torch.randint(32000, (sum(LENGTHS),)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        x = embedding(tokens)[None]
        for block in blocks:
            x = block(x, documents)
        loss = nn.functional.cross_entropy(head(x)[0], tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
