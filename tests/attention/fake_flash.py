"""A stand-in for the flash-attn 2 package: the same two functions, their contract enforced, dense math on the CPU.

It raises wherever the package raises, or would read what it must not: dtypes, shapes, strides, page sizes, tables
and lengths. Arguments that this project never sets must have their defaults. Parameter names and defaults are
those of flash-attn 2.7 and 2.8; the tests compare them with the package's own where it is installed.

Shape letters: those of `rollout.attention.interface`; p tokens of a page, n new tokens of each row.
"""

from types import ModuleType

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


class ContractError(RuntimeError):
    """What the package was given is not what it takes."""


def fake_flash_module() -> ModuleType:
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    _require(
        (dropout_p, window_size, softcap, alibi_slopes, return_attn_probs) == (0.0, (-1, -1), 0.0, None, False),
        "an argument that this stand-in does not know",
    )
    _require(block_table is not None, "keys that are not paged")
    _check_paged(q, k, v, block_table, rows=len(cu_seqlens_q) - 1)
    _require(q.dim() == 3, f"q has shape {tuple(q.shape)}, not [T, N, H]")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_int32(name, cu, (block_table.shape[0] + 1,))
        _require(int(cu[0]) == 0 and bool((cu.diff() >= 0).all()), f"{name} are not offsets: {cu.tolist()}")
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    for name, longest, lengths in (("q", max_seqlen_q, queries), ("k", max_seqlen_k, keys)):
        _require(type(longest) is int and longest >= max(lengths), f"max_seqlen_{name} is {longest}, not {lengths}")
    _require(sum(queries) == q.shape[0], f"{q.shape[0]} rows of q, but the offsets end at {sum(queries)}")
    starts = cu_seqlens_q.tolist()
    outs = [
        _dense(q[start : start + count], k, v, block_table[s], length, causal, softmax_scale)
        for s, (start, count, length) in enumerate(zip(starts, queries, keys, strict=False))
    ]
    return torch.cat(outs).to(q.dtype)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    unknown = (rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes, window_size, softcap)
    _require(unknown == (None, None, None, None, None, (-1, -1), 0.0), "an argument that this stand-in does not know")
    _require(rotary_interleaved is True and return_softmax_lse is False, "an argument that this stand-in does not know")
    _require(type(num_splits) is int and num_splits >= 0, f"num_splits is {num_splits!r}")
    _require(block_table is not None and cache_seqlens is not None, "keys that are not paged, or no lengths")
    _require(q.dim() == 4, f"q has shape {tuple(q.shape)}, not [B, n, N, H]")
    B, n, _, H = q.shape
    _check_paged(q, k_cache, v_cache, block_table, rows=B)
    _check_int32("cache_seqlens", cache_seqlens, (B,))
    page_tokens, K = k_cache.shape[1:3]
    capacity = block_table.shape[1] * page_tokens
    _require(int(cache_seqlens.max()) + n <= capacity, f"{cache_seqlens.tolist()} + {n} tokens in tables of {capacity}")
    for name, new in (("k", k), ("v", v)):
        _require(new is not None, f"no {name} to append")
        _require(tuple(new.shape) == (B, n, K, H), f"{name} has shape {tuple(new.shape)}, not {(B, n, K, H)}")
        _require(new.dtype == q.dtype, f"{name} is {new.dtype}, q is {q.dtype}")
        _require(new.stride(-1) == 1, f"{name} has strides {new.stride()}")
    for row, length in enumerate(cache_seqlens.tolist()):
        for i in range(n):
            page, slot = int(block_table[row, (length + i) // page_tokens]), (length + i) % page_tokens
            k_cache[page, slot] = k[row, i]
            v_cache[page, slot] = v[row, i]
    outs = [
        _dense(q[row], k_cache, v_cache, block_table[row], length + n, causal, softmax_scale)
        for row, length in enumerate(cache_seqlens.tolist())
    ]
    return torch.stack(outs).to(q.dtype)


def _dense(
    q_nNH: Tensor, k_pages: Tensor, v_pages: Tensor, table_P: Tensor, length: int, causal: bool, scale: float | None
) -> Tensor:
    """Attention of the last n of `length` tokens, in fp64."""
    page_tokens, K, H = k_pages.shape[1:]
    used = table_P[: -(-length // page_tokens)].long()
    k_lKH, v_lKH = (pages[used].reshape(-1, K, H)[:length].double() for pages in (k_pages, v_pages))
    q_nKGH = q_nNH.double().unflatten(1, (K, -1))
    scores_KGnl = torch.einsum("nkgh,lkh->kgnl", q_nKGH, k_lKH) * (H**-0.5 if scale is None else scale)
    if causal:
        position_n = torch.arange(length - len(q_nNH), length)
        scores_KGnl = scores_KGnl.masked_fill(torch.arange(length) > position_n[:, None], -torch.inf)
    return torch.einsum("kgnl,lkh->nkgh", scores_KGnl.softmax(-1), v_lKH).flatten(1, 2)


def _check_paged(q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, *, rows: int) -> None:
    _require(q.dtype in HALF, f"q is {q.dtype}, not one of {HALF}")
    _require(q.stride(-1) == 1, f"q has strides {q.stride()}")
    _require(not torch.is_grad_enabled() or not q.requires_grad, "gradients through a paged cache")
    N, H = q.shape[-2:]
    _require(k_pages.dim() == 4 and k_pages.shape[3] == H, f"k pages have shape {tuple(k_pages.shape)}")
    _require(k_pages.shape == v_pages.shape, f"k and v pages differ: {k_pages.shape}, {v_pages.shape}")
    for name, pages in (("k", k_pages), ("v", v_pages)):
        _require(pages.dtype == q.dtype, f"{name} pages are {pages.dtype}, q is {q.dtype}")
        _require(pages.stride(-1) == 1, f"{name} pages have strides {pages.stride()}")
        # The kernels load 16 bytes at a time.
        aligned = all(stride % 8 == 0 for stride in pages.stride()[:-1]) and pages.data_ptr() % 16 == 0
        _require(aligned, f"{name} pages are not aligned to 16 bytes: strides {pages.stride()}")
    _require(k_pages.shape[1] % 256 == 0, f"pages of {k_pages.shape[1]} tokens, not a multiple of 256")
    _require(N % k_pages.shape[2] == 0, f"{N} query heads for {k_pages.shape[2]} KV heads")
    _require(H % 8 == 0 and H <= 256, f"head_dim {H}, not a multiple of 8 up to 256")
    _require(rows > 0, "an empty batch")
    _require(tables.dim() == 2 and tables.shape[0] == rows, f"tables of shape {tuple(tables.shape)} for {rows} rows")
    _require(tables.dtype == torch.int32, f"block_table is {tables.dtype}, not int32")
    _require(tables.stride(-1) == 1, f"block_table has strides {tables.stride()}")
    _require(bool(((tables >= 0) & (tables < k_pages.shape[0])).all()), f"no such page: {tables.tolist()}")


def _check_int32(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    _require(isinstance(tensor, Tensor) and tensor.dtype == torch.int32, f"{name} is not an int32 tensor")
    _require(tensor.is_contiguous(), f"{name} has strides {tensor.stride()}")
    _require(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}")


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise ContractError(problem)
