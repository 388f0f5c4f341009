"""Accelerate's loop with accumulation: BERT classifies, is evaluated after each epoch and saved."""

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = BertForSequenceClassification(BertConfig(num_labels=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
data = DataLoader(TensorDataset(torch.randint(30000, (64, 128)), torch.randint(2, (64,))), batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for _ in range(2):
    model.train()
    for tokens, labels in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=labels).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    for tokens, labels in data:
        with torch.no_grad():
            found = model(input_ids=tokens).logits.argmax(-1)
        accelerator.gather_for_metrics((found, labels))
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
accelerator.end_training()
