"""A script with transformers' Trainer, which knows nothing of Fitproof: a small GPT-2 on random tokens.

python experiments/examples/trainer.py --output_dir out --max_steps 100 --per_device_train_batch_size 16
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

VOCABULARY, LENGTH = 4096, 128


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return 1024

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Return a sequence, the same one for the same number."""
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train as the command line says."""
    [arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4))
    Trainer(model, arguments, train_dataset=RandomTokens()).train()


if __name__ == "__main__":
    main()
