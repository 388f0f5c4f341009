"""Images: vision.py resnet|vit|detection. A classifier with float16 and loss scaling, or a detector."""

import sys

import torch
from torch import nn

kind = sys.argv[1]
if kind == "vit":
    import timm

    model = timm.create_model("vit_small_patch16_224")
elif kind == "resnet":
    from torchvision.models import resnet50

    model = resnet50()
else:
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5)
model = model.cuda().train()
if kind == "resnet":
    model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=128.0)  # so that no step is left out
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        if kind == "detection":
            images = [torch.rand(3, 256, 256).cuda() for _ in range(2)]
            boxes = torch.tensor([[10.0, 10.0, 100.0, 100.0], [50.0, 60.0, 200.0, 180.0]]).cuda()
            targets = [{"boxes": boxes, "labels": torch.tensor([1, 2]).cuda()} for _ in images]
            loss = sum(model(images, targets).values())
        else:
            images = torch.randn(16, 3, 224, 224).cuda(non_blocking=True)
            if kind == "resnet":
                images = images.to(memory_format=torch.channels_last)
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, torch.randint(1000, (16,)).cuda(), label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
