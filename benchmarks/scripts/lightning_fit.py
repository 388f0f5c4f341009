"""Lightning's Trainer, with validation, clipping and pinned batches: lightning_fit.py PRECISION [checkpoint].

The second word recomputes each layer in the backward pass.
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Encoder(lightning.LightningModule):
    """A transformer encoder that predicts its own input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.embedding, self.head = nn.Embedding(8000, 512), nn.Linear(512, 8000)
        self.body = nn.TransformerEncoder(layer, 4)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the mean loss of a batch."""
        x = self.embedding(batch[0])
        for layer in self.body.layers:
            x = checkpoint(layer, x, use_reentrant=False) if "checkpoint" in sys.argv else layer(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch[0])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Log the mean loss of a batch."""
        self.log("validation_loss", self.training_step(batch, index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


data = DataLoader(TensorDataset(torch.randint(8000, (64, 256))), batch_size=8, num_workers=1, pin_memory=True)
lightning.Trainer(
    max_epochs=1,
    accelerator="gpu",
    devices=1,
    precision=sys.argv[1],
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
).fit(Encoder(), data, data)
