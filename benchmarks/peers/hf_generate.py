"""Hugging Face `generate`: one static batch, eager, with its default cache.

Options: `model`, `dtype`, `cores`. Prompts of one request must have the same length.
"""

import time
from typing import Any

from benchmarks.peers.protocol import Prepared, serve, versions


def load(options: dict[str, Any]) -> Any:
    """The model, which ends no sequence on its own."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(options["cores"]))
    model = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=getattr(torch, options["dtype"]), attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def described(model: Any) -> dict[str, Any]:
    import torch

    return {
        "versions": versions("transformers", "torch"),
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
        "attention": model.config._attn_implementation,
        "compiled": False,
    }


def prepare(options: dict[str, Any]) -> Prepared:
    import torch
    from transformers import GenerationConfig

    model = load(options)

    def generate(request: dict[str, Any]) -> dict[str, Any]:
        prompts = torch.tensor(request["prompts"])
        config = GenerationConfig(
            max_new_tokens=request["new_tokens"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        start = time.monotonic()
        done = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
        logprobs = model.compute_transition_scores(done.sequences, done.scores, normalize_logits=True)
        output_ids = done.sequences[:, prompts.shape[1] :].tolist()
        counts = [len(row) for row in logprobs.tolist()]
        return {"seconds": time.monotonic() - start, "output_ids": output_ids, "logprobs": counts}

    return described(model), {"generate": generate}


if __name__ == "__main__":
    serve(prepare)
