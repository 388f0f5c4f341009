"""Lightning's Trainer in 16-bit mixed precision, with validation, clipping and pinned batches of a worker process."""

import lightning
import torch
from torch import nn
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
        logits = self.head(self.body(self.embedding(batch[0])))
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
    precision="16-mixed",
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
).fit(Encoder(), data, data)
