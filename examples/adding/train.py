"""Trains the tiny Llama of the examples with Transformers alone: `python examples/adding/train.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NUMBERS, STEPS, LENGTH, ITERATIONS = 32, 8, 16, 1500


def main() -> None:
    """Train on sequences such as `5 +3 8 +2 10`, and write the weights beside this file."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=NUMBERS + STEPS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=ITERATIONS)
    for iteration in range(ITERATIONS):
        starts, steps = torch.randint(NUMBERS, (64, 1)), torch.randint(STEPS, (64, LENGTH // 2))
        numbers = (starts + steps.cumsum(1) - steps) % NUMBERS
        tokens = torch.stack([numbers, NUMBERS + steps], 2).flatten(1)
        labels = torch.where(tokens < NUMBERS, tokens, -100)  # steps are random
        labels[:, 0] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if iteration % 100 == 99:
            print(f"iteration {iteration + 1}: loss {loss.item():.4f}", flush=True)
    model.save_pretrained(Path(__file__).parent)


if __name__ == "__main__":
    main()
