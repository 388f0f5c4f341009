"""A diffusion model's UNet of diffusers, conditioned on text, with checkpointing and a bfloat16 autocast."""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel

model = UNet2DConditionModel(sample_size=32, block_out_channels=(128, 256, 512, 512), cross_attention_dim=512).cuda()
model.enable_gradient_checkpointing()
scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    latents, text = torch.randn(4, 4, 32, 32, device="cuda"), torch.randn(4, 77, 512, device="cuda")
    noise, times = torch.randn_like(latents), torch.randint(1000, (4,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        predicted = model(scheduler.add_noise(latents, noise, times), times, text).sample
        loss = torch.nn.functional.mse_loss(predicted.float(), noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
