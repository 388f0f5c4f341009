"""A recurrent language model of two layers on sequences of different lengths: recurrent.py LSTM|GRU."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Recurrent(nn.Module):
    """An embedding, a recurrent net and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10_000, 256), nn.Linear(512, 10_000)
        self.body = getattr(nn, sys.argv[1])(256, 512, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, tokens_BT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        packed = pack_padded_sequence(self.embedding(tokens_BT), lengths_B, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.body(packed)[0], batch_first=True)[0])


torch.manual_seed(0)  # the lengths of sequences are random
model = Recurrent().cuda()
optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.9)
for _ in range(3):
    lengths = torch.randint(32, 128, (32,))
    tokens = torch.randint(10_000, (32, int(lengths.max()))).cuda()
    loss = nn.functional.cross_entropy(model(tokens, lengths).transpose(1, 2), tokens)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    optimizer.zero_grad()
