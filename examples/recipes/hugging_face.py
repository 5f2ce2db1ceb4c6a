"""From Hugging Face's files into FSDP's shards and back: no rank ever has the whole model.

phalanx run -n 2 examples/recipes/hugging_face.py      pip install transformers
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import phalanx

BEFORE, SAVED = "runs/recipes/pretrained", "runs/recipes/trained"
CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
TOKENS = (torch.arange(8 * 16).reshape(8, 16) * 3) % 64


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    if backend.rank == 0:  # in place of a download
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(BEFORE)
    backend.barrier()
    with torch.device("meta"):  # shapes, without memory
        empty = AutoModelForCausalLM.from_config(CONFIG)
    model = phalanx.FSDP(empty, backend, unit=LlamaDecoderLayer, initialize=empty._init_weights)
    phalanx.load_pretrained(BEFORE, model)  # a rank reads its own part
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = TOKENS[backend.rank :: backend.world_size]
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
    phalanx.save_checkpoint(SAVED, model=model, optimizer=optimizer, step=10)
    backend.print(f"loss {model(input_ids=TOKENS, labels=TOKENS).loss.item():.4f} after 10 steps")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)
