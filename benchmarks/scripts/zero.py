"""DeepSpeed's ZeRO: zero.py STAGE [offload], an encoder in bfloat16."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("stage", type=int)
parser.add_argument("--offload", action="store_true")
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()
model = nn.Sequential(*(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)))
zero = {"stage": arguments.stage, **({"offload_optimizer": {"device": "cpu"}} if arguments.offload else {})}
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    },
)
for _ in range(3):
    x = torch.randn(4, 256, 512, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()
