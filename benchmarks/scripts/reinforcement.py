"""Policy gradients on what the model itself wrote: GPT-2 generates until its end token, then learns from rewards."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_layer=4, bos_token_id=0, eos_token_id=1)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
for _ in range(3):
    prompts = torch.randint(2, 50257, (8, 16), device="cuda")
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": True, "pad_token_id": 1}
    written = model.generate(prompts, max_new_tokens=32, **options)
    log_probabilities = model(written).logits[:, :-1].log_softmax(-1).gather(-1, written[:, 1:, None]).squeeze(-1)
    mask = (written[:, 1:] != 1).float()
    rewards = torch.randn(8, 1, device="cuda")
    loss = -(rewards * log_probabilities * mask).sum() / mask.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
