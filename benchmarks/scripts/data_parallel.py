"""Several processes under torchrun: data_parallel.py ddp|fsdp, an encoder with clipping and a summed loss."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

kind, rank = sys.argv[1], int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = nn.Sequential(*(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4))).cuda()
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
else:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    loss = model(torch.randn(4, 256, 512, device="cuda")).float().square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
dist.destroy_process_group()
