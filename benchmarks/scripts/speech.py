"""Speech: speech.py whisper|ctc. Whisper learns to write, or a wav2vec 2.0 is trained with the loss of CTC."""

import sys

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(0)  # wav2vec 2.0 leaves out layers at random
if sys.argv[1] == "whisper":
    model = WhisperForConditionalGeneration(WhisperConfig()).cuda()
    batch = {"input_features": torch.randn(4, 80, 3000), "labels": torch.randint(50000, (4, 64))}
else:
    small = Wav2Vec2Config(num_hidden_layers=4, hidden_size=512, intermediate_size=2048, num_attention_heads=8)
    model = Wav2Vec2ForCTC(small).cuda()
    batch = {"input_values": torch.randn(4, 32000), "labels": torch.randint(1, 30, (4, 12))}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**{name: tensor.cuda() for name, tensor in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
