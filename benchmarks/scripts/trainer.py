"""transformers' Trainer on GPT-2: trainer.py [fp16] [compile] [evaluate] [save] [OPTIMIZER]."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

words = sys.argv[1:]
optimizers = [word for word in words if word not in ("fp16", "compile", "evaluate", "save")]


class Tokens(Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(50257, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        gradient_checkpointing="compile" not in words,
        max_steps=3,
        fp16="fp16" in words,
        bf16="fp16" not in words,
        torch_compile="compile" in words,
        optim=optimizers[0] if optimizers else "adamw_torch_fused",
        eval_strategy="steps" if "evaluate" in words else "no",
        save_strategy="steps" if "save" in words else "no",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        report_to=[],
    )
    trainer = Trainer(GPT2LMHeadModel(GPT2Config()), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train()
