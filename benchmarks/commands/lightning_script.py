"""A script with Lightning's command line as its users write it: GPT-2 of two layers on random tokens."""

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel


class Language(LightningModule):
    """The model and its loss."""

    def __init__(self, width: int = 128, num_layers: int = 2) -> None:
        super().__init__()
        shape = {"vocab_size": 1024, "n_positions": 64, "n_embd": width, "n_layer": num_layers, "n_head": 4}
        self.model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the mean loss of a batch."""
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Tokens(LightningDataModule):
    """Sequences of 64 tokens, in random order."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Return the batches."""
        tokens = torch.randint(1024, (4096, 64), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(tokens), batch_size=self.batch_size, shuffle=True)


if __name__ == "__main__":
    LightningCLI(Language, Tokens, seed_everything_default=0)
