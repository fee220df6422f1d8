"""What a Hugging Face decoder makes of a batch, at the places that matter: before every sampled token.

logits_NV = model.get_output_embeddings()(hidden_before_sampled(model.base_model, batch))
logprobs_BS = logprobs_of_sampled(logits_NV, batch, temperature=1.0)
"""

from typing import Any

import torch
from torch import Tensor

from rollout.training.batch import Batch


def hidden_before_sampled(decoder: Any, batch: Batch) -> Tensor:
    """[N, H]: last hidden states that the N sampled tokens were predicted from, in order of rows and positions.

    Samples of a prompt share what the decoder makes of it: positions before the first that any row sampled are computed
    once for all rows that begin alike, and gradients flow through what is shared. `decoder` is a model without its head
    (`model.base_model`) that takes a `DynamicCache`.
    """
    from transformers import DynamicCache

    shared = max(0, int(batch.mask_BS.int().argmax(dim=1).min()) - 1)
    cache = DynamicCache()
    # The fourth argument by position: its name differs between versions of transformers.
    if shared:
        prefixes_US, row_B = torch.unique(batch.ids_BS[:, :shared], dim=0, return_inverse=True)
        decoder(prefixes_US, None, None, cache)
        cache.batch_select_indices(row_B)
    rest_BSH = decoder(batch.ids_BS[:, shared:], batch.attention_BS, None, cache).last_hidden_state
    hidden_NH: Tensor = rest_BSH[:, :-1][batch.mask_BS[:, shared + 1 :]]
    return hidden_NH


def logprobs_of_sampled(logits_NV: Tensor, batch: Batch, *, temperature: float) -> Tensor:
    """[B, S], fp32: log-probabilities of the sampled tokens at the temperature of their sampling, 0 elsewhere.

    `logits_NV` are the head's for `hidden_before_sampled`: nothing else needs the vocabulary.
    """
    all_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    chosen_N = all_NV.gather(-1, batch.ids_BS[batch.mask_BS][:, None]).squeeze(-1)
    return scattered(chosen_N, batch)


def scattered(values_N: Tensor, batch: Batch) -> Tensor:
    """[B, S]: each value at its sampled token, 0 elsewhere."""
    return values_N.new_zeros(batch.mask_BS.shape).masked_scatter(batch.mask_BS, values_N)
