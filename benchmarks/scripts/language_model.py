"""GPT-2 in plain PyTorch with a bfloat16 autocast: language_model.py MODE, a mode of torch.compile or `eager`."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

mode = sys.argv[1]
model = GPT2LMHeadModel(GPT2Config(n_layer=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).cuda()
run = model if mode == "eager" else torch.compile(model, mode=mode)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _ in range(4):
    tokens = torch.randint(50257, (4, 512), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
