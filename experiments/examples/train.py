"""A training loop in plain PyTorch, which knows nothing of Fitproof: a model of GPT-2's size on random tokens.

fitproof simulate --gpu rtx4090 -- python experiments/examples/train.py --batch_size 12
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 50_304, 768, 12, 12, 1024


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Return the hidden states behind this block."""
        heads = self.attention(self.norms[0](x_BTC)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x_BTC = x_BTC + self.output(attended.transpose(1, 2).flatten(-2))
        return x_BTC + self.mlp(self.norms[1](x_BTC))


class LanguageModel(nn.Module):
    """A decoder with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x_BTC = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        logits_BTV = self.head(self.norm(self.blocks(x_BTC)))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def main() -> None:
    """Train for a hundred steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=12)
    batch_size = parser.parse_args().batch_size
    model = LanguageModel().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(100):
        tokens = torch.randint(VOCABULARY, (batch_size, LENGTH + 1)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
