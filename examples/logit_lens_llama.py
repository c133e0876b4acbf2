"""The logit lens of a Llama of Hugging Face, converted to Megatron and sharded over tp=2 x pp=2.

    torchrun --nproc-per-node 4 examples/logit_lens_llama.py

`FOLDER` may be any folder that `from_pretrained` reads.
"""

import tiny
import torch
import torch.distributed as dist

import megatron_flex as mf

FOLDER = tiny.ADDING


def main():
    flex = mf.FlexModel(tiny.load_model(FOLDER))  # mf.config_from_hf and mf.load_hf are in it
    tokens = tiny.sums(torch.tensor([5]), torch.tensor([[3, 2, 4, 1]]))
    _, cache = flex.interp.run_with_cache(tokens)
    lens = cache.logit_lens(cache.accumulated_resid())  # [layer, batch, position, token]
    picture = mf.plot.logit_lens(cache, tokens=tokens[0].tolist(), tokenizer=tiny.word)
    flex.restore()

    if dist.get_rank() == 0:
        for layer, guesses in enumerate(lens[:, 0].argmax(-1)):
            print(f"before layer {layer}:" if layer < 4 else "after layer 3: ", tiny.show(guesses[1::2]))
        tiny.save(picture)
        difference = (lens - lens_of_transformers(tokens)).abs().max() / lens.abs().max()
        assert difference < 1e-5
        print("greatest relative difference from Transformers is below 1e-05")
    dist.destroy_process_group()


def lens_of_transformers(tokens):
    """The same from LlamaForCausalLM, whose last hidden state is normalized already."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        *streams, last = model(tokens, output_hidden_states=True).hidden_states
        return torch.stack(
            [*(model.lm_head(model.model.norm(stream)) for stream in streams), model.lm_head(last)]
        )


if __name__ == "__main__":
    main()
