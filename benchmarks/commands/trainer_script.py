"""A Trainer script as its users write it: GPT-2 of two layers on random tokens."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 64 tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(1024, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


[arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
shape = {"vocab_size": 1024, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
Trainer(model, arguments, train_dataset=Tokens()).train()
