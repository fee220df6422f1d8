"""The kernels as Python calls them: structures as in `src/`, and a team of threads that runs them.

A call takes addresses and releases the GIL; that they are right is up to the caller, who keeps what they point to.
"""

import ctypes
import os
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache

from rollout.errors import NativeKernelsError
from rollout.native.build import build

PANEL = 32
"""Output columns of a packed linear map that lie together."""
LINE_BYTES = 64
"""Of the cache."""
LANES = 16
"""Elements that may be read past the end of a row of id bits."""
MOST_GROUPS = 256
"""Query heads that may share a KV head."""


class Linear(Structure):
    _fields_ = (("words", c_void_p), ("bias", c_void_p), ("steps", c_int32), ("panels", c_int32))


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
    )


class Model(Structure):
    _fields_ = (
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("eps", c_float),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("layer", POINTER(Layer)),
        ("head", Linear),
    )


class Pages(Structure):
    _fields_ = (("base", c_void_p), ("page_stride", c_int64), ("layer_stride", c_int64), ("page_tokens", c_int32))


class Batch(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("sequences", c_int32),
        ("table_width", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("tables", c_void_p),
        ("offsets", c_void_p),
    )


class Draws(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("vocabulary", c_int32),
        ("stride", c_int64),
        ("id_bits", c_void_p),
        ("temperatures", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("keys", c_void_p),
        ("ban_offsets", c_void_p),
        ("bans", c_void_p),
        ("ids", c_void_p),
        ("logprobs", c_void_p),
    )


class Kernels:
    """The library with a team of `threads` threads, the calling one included. One caller at a time."""

    def __init__(self, threads: int) -> None:
        """Raises `NativeKernelsError` where the kernels cannot be built."""
        self.build, self._library = load()
        self.threads = threads
        self._team = c_void_p(self._library.rollout_team_new(threads))

    def workspace_bytes(self, model: Model, *, bf16: bool, rows: int) -> int:
        size: int = self._library.rollout_workspace_bytes(ctypes.byref(model), bf16, rows, self.threads)
        return size

    def forward(self, model: Model, pages: Pages, batch: Batch, *, bf16: bool, workspace: int, hidden: int) -> None:
        refs = (ctypes.byref(pages), ctypes.byref(batch))
        self._library.rollout_forward(self._team, ctypes.byref(model), bf16, *refs, workspace, hidden)

    def logits(self, model: Model, *, bf16: bool, hidden: int, rows: int, out: int) -> None:
        self._library.rollout_logits(self._team, ctypes.byref(model), bf16, hidden, rows, out)

    def pack(self, *, rows: int, count: int, steps: int, panels: int, copy: int | None) -> None:
        """Write `count` rows of `steps` words into panels, and as they are to `copy`; both begin at a cache line."""
        assert not (panels | (copy or 0)) % LINE_BYTES, f"panels at {panels:#x} and a copy at {copy or 0:#x}"
        self._library.rollout_pack(self._team, rows, count, steps, panels, copy)

    def unpack(self, *, panels: int, count: int, steps: int, rows: int) -> None:
        """Write what panels hold as `count` rows of `steps` words."""
        self._library.rollout_unpack(self._team, panels, count, steps, rows)

    @property
    def histogram_bytes(self) -> int:
        """What sampling with top-k or top-p needs for each thread."""
        size: int = self._library.rollout_histogram_bytes()
        return size

    def sample(self, draws: Draws, *, bf16: bool, logits: int, histograms: int) -> None:
        self._library.rollout_sample(self._team, bf16, ctypes.byref(draws), logits, histograms)

    def close(self) -> None:
        """End the threads; nothing may be called afterwards."""
        if self._team:
            self._library.rollout_team_delete(self._team)
            self._team = c_void_p()


@cache
def load() -> tuple[str, ctypes.CDLL]:
    """The library and the name of its build, compiled first if need be.

    Raises `NativeKernelsError`.
    """
    path = build()
    try:
        library = ctypes.CDLL(os.fspath(path))
    except OSError:  # a damaged file, perhaps
        path = build(again=True)
        try:
            library = ctypes.CDLL(os.fspath(path))
        except OSError as error:
            raise NativeKernelsError(f"native kernels: {path} cannot be loaded: {error}") from None
    pointer, int32, int64 = c_void_p, c_int32, c_int64
    for name, result, arguments in (
        ("team_new", pointer, (int32,)),
        ("team_delete", None, (pointer,)),
        ("workspace_bytes", int64, (pointer, int32, int32, int32)),
        ("forward", None, (pointer, pointer, int32, pointer, pointer, pointer, pointer)),
        ("logits", None, (pointer, pointer, int32, pointer, int32, pointer)),
        ("pack", None, (pointer, pointer, int32, int32, pointer, pointer)),
        ("unpack", None, (pointer, pointer, int32, int32, pointer)),
        ("histogram_bytes", int64, ()),
        ("sample", None, (pointer, int32, pointer, pointer, pointer)),
    ):
        function = getattr(library, f"rollout_{name}")
        function.restype, function.argtypes = result, arguments
    mirrored = [ctypes.sizeof(structure) for structure in (Linear, Layer, Model, Pages, Batch, Draws)]
    sizes = list((c_int64 * len(mirrored)).in_dll(library, "rollout_sizes"))
    assert sizes == mirrored, f"structures of {sizes} bytes there, of {mirrored} bytes here"
    return path.stem, library
