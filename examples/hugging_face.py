"""A Hugging Face causal model, made from a config, with a product-key memory for the feed-forward network of one layer.

    pip install transformers
    python examples/hugging_face.py [steps]         # a small Llama learns this package's own source; nothing is downloaded

The same lines put a memory into a model that was trained: only the memory is then to be learnt from nothing.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pkm

STEPS, CONTEXT = int(sys.argv[1]) if len(sys.argv) > 1 else 400, 64

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
    bos_token_id=0,
    eos_token_id=0,
)
model = LlamaForCausalLM(config)
# Queries with layer normalisation: batch normalisation would count padding, of which this layer is told nothing.
query = {"dim": 64, "norm": "layer"}
model.model.layers[1].mlp = pkm.ProductKeyMemory(config.hidden_size, sub_keys=64, heads=4, knn=16, query=query)
model.to("cuda" if torch.cuda.is_available() else "cpu").train()
optimizer = pkm.optimizers(model, lr=1e-3, values_lr=3e-3)

text = torch.tensor(list(b"".join(file.read_bytes() for file in sorted(Path(pkm.__file__).parent.rglob("*.py")))))
for step in range(1, STEPS + 1):
    windows = text[torch.randint(len(text) - CONTEXT, (16, 1)) + torch.arange(CONTEXT)].to(model.device)
    loss = model(input_ids=windows, labels=windows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 or step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)

model.eval()
prompt = torch.tensor([list(b"def ")], device=model.device)
ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
print(bytes(ids[0].tolist()).decode(errors="replace"))
