"""Hugging Face continuous batching (`generate_batch`), eager, without sharing of prefixes.

Options: `model`, `dtype`, `cores`, `max_running`, `max_context_tokens`.
"""

import time
from typing import Any

from benchmarks.peers.hf_generate import described, load
from benchmarks.peers.protocol import Prepared, serve

PAGE_TOKENS = 256
BATCH_TOKENS = 2048


def prepare(options: dict[str, Any]) -> Prepared:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = load(options)
    settings = {
        "page_size": PAGE_TOKENS,
        "num_blocks": options["max_running"] * -(-options["max_context_tokens"] // PAGE_TOKENS),
        "max_batch_tokens": BATCH_TOKENS,
        "max_requests_per_batch": options["max_running"],
        "allow_block_sharing": False,
        "return_logprobs": True,
        "seed": 0,
    }

    def generate(request: dict[str, Any]) -> dict[str, Any]:
        config = GenerationConfig(
            max_new_tokens=request["new_tokens"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=-1,  # none: without one it asks the model's configuration
            pad_token_id=0,
        )
        start = time.monotonic()
        done = model.generate_batch(
            request["prompts"],
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            progress_bar=False,
        )
        seconds = time.monotonic() - start
        errors = [output.error for output in done.values() if output.error]
        if errors:
            raise RuntimeError(errors[0])
        return {
            "seconds": seconds,
            "output_ids": [output.generated_tokens for output in done.values()],
            "logprobs": [len(output.logprobs) for output in done.values()],
        }

    return described(model) | {"continuous_batching": settings}, {"generate": generate}


if __name__ == "__main__":
    serve(prepare)
