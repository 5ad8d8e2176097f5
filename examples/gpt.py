"""A GPT of the kind people write, with a product-key memory in place of the feed-forward network of its middle block.

python examples/gpt.py [steps]          # it learns this package's own source, byte by byte
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import pkm

STEPS, CONTEXT, DIM, HEADS, LAYERS = int(sys.argv[1]) if len(sys.argv) > 1 else 400, 64, 128, 4, 3


class Block(nn.Module):
    def __init__(self, memory):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        if memory:
            self.ffn = pkm.ProductKeyMemory(DIM, sub_keys=64, heads=4, knn=16, query={"dim": 64})  # 64^2 slots
        else:
            self.ffn = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ffn(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.Sequential(*(Block(memory=layer == LAYERS // 2) for layer in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, vocabulary)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions.weight)))


torch.manual_seed(0)
text = torch.tensor(list(b"".join(file.read_bytes() for file in sorted(Path(pkm.__file__).parent.rglob("*.py")))))
device = "cuda" if torch.cuda.is_available() else "cpu"
model = GPT(vocabulary=256).to(device)
optimizer = pkm.optimizers(model, lr=1e-3, values_lr=3e-3, weight_decay=0.1)  # one for all of the model
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
for step in range(1, STEPS + 1):
    windows = text[torch.randint(len(text) - CONTEXT, (16, 1)) + torch.arange(CONTEXT + 1)].to(device)
    loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step == 1 or step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
