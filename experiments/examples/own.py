"""Your own model and corpus: two functions, named in own.yaml as path.to.module:function."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeline.base.contracts import CorpusRequest


class Decoder(nn.Module):
    """A small causal language model: input ids [B, T] -> logits [B, T, V]."""

    def __init__(self, vocabulary_size: int, width: int = 128, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(  # the longest list of layers of one class is what checkpointing works on
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, vocabulary_size)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        length = ids_BT.shape[1]
        x_BTC = self.embedding(ids_BT) + self.position(torch.arange(length, device=ids_BT.device))
        mask_TT = torch.ones(length, length, dtype=torch.bool, device=ids_BT.device).triu(1)
        for block in self.blocks:
            x_BTC = block(x_BTC, src_mask=mask_TT)
        logits_BTV: Tensor = self.head(x_BTC)
        return logits_BTV

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, as transformers' models do: the loss may then be computed without all logits."""
        return self.head


def build_model(vocabulary_size: int) -> nn.Module:
    """Return the model for the corpus's vocabulary; the loss over its logits is Fitproof's."""
    return Decoder(vocabulary_size)


def read_corpus(request: CorpusRequest) -> Iterator[str]:
    """Yield texts, one a document; Fitproof trains a tokenizer on them and packs them."""
    for number in range(2000):
        factor = number % 97 + request.seed
        yield f"{number} times {factor} is {number * factor}, and {number} plus {factor} is {number + factor}.\n"
