"""The decoder on the CPU by kernels of our own: packed weights, one call for all layers of a forward.

Bits of a row depend on its own sequence and the weights only: not on the other rows, how many there are, where a
prefill was cut into chunks, the page size, or the number of threads.

Shape letters: T tokens, R rows to predict from, E hidden, V vocabulary.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rollout.attention.interface import DecodeBatch, PrefillBatch
from rollout.errors import NativeKernelsError
from rollout.memory import TensorMemory
from rollout.model.packed import PackedLinear
from rollout.model.rope import RopeTable
from rollout.model.spec import ModelSpec
from rollout.model.weights import Target, Whole, head_widths
from rollout.native.library import MOST_GROUPS, Batch, Kernels, Layer, Model, Pages


class NativeLayer:
    """The weights of one layer, packed."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, *, dtype: torch.dtype) -> None:
        def linear(x: int, parts: Mapping[str, int], *, bias: bool = False) -> PackedLinear:
            return PackedLinear(x, parts, bias=bias, dtype=dtype, kernels=kernels)

        widths = head_widths(spec)
        self._norms_2E = torch.empty((2, spec.hidden), dtype=dtype)
        self._qkv = linear(spec.hidden, widths, bias=spec.qkv_bias)
        self._out = linear(widths["q"], {"o": spec.hidden})
        self._gate_up = linear(spec.hidden, {"gate": spec.intermediate, "up": spec.intermediate})
        self._down = linear(spec.intermediate, {"down": spec.hidden})
        self._qkv_bias = spec.qkv_bias

    def targets(self) -> Mapping[str, Target]:
        """Where each tensor goes, under its Hugging Face name within the layer."""
        norms = zip(("input_layernorm", "post_attention_layernorm"), self._norms_2E, strict=True)
        targets: dict[str, Target] = {f"{name}.weight": Whole(norm_E) for name, norm_E in norms}
        targets |= {f"self_attn.{part}_proj.weight": self._qkv.weight(part) for part in "qkv"}
        if self._qkv_bias:
            targets |= {f"self_attn.{part}_proj.bias": self._qkv.bias(part) for part in "qkv"}
        targets |= {f"mlp.{part}_proj.weight": self._gate_up.weight(part) for part in ("gate", "up")}
        return targets | {
            "self_attn.o_proj.weight": self._out.weight("o"),
            "mlp.down_proj.weight": self._down.weight("down"),
        }

    def linears(self) -> tuple[PackedLinear, ...]:
        return self._qkv, self._out, self._gate_up, self._down

    def memory(self) -> Iterator[Tensor]:
        """Everything that it holds."""
        yield self._norms_2E
        for linear in self.linears():
            yield from linear.memory()

    def native(self) -> Layer:
        attention_norm_E, mlp_norm_E = self._norms_2E
        return Layer(
            attention_norm=attention_norm_E.data_ptr(),
            mlp_norm=mlp_norm_E.data_ptr(),
            qkv=self._qkv.native(),
            out=self._out.native(),
            gate_up=self._gate_up.native(),
            down=self._down.native(),
        )


class NativeDecoder:
    """Runs on the team of threads it is given; `refusal` says for which models it cannot."""

    name = "native"
    batch_invariant = True

    def __init__(self, spec: ModelSpec, kernels: Kernels, *, dtype: torch.dtype) -> None:
        if why := refusal(spec):
            raise NativeKernelsError(f"native kernels: {why}")
        self.spec = spec
        self.dtype = dtype
        self.build = kernels.build
        self._kernels = kernels
        self._bf16 = dtype is torch.bfloat16
        self._embedding_VE = torch.empty((spec.vocab_size, spec.hidden), dtype=dtype)
        self._norm_E = torch.empty((spec.hidden,), dtype=dtype)
        self._layers = [NativeLayer(spec, kernels, dtype=dtype) for _ in range(spec.layers)]
        self._head = PackedLinear(spec.hidden, {"head": spec.vocab_size}, bias=False, dtype=dtype, kernels=kernels)
        self._rope = RopeTable(
            spec.rope,
            head_dim=spec.head_dim,
            positions=spec.max_context_tokens,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        layers = (tensor for layer in self._layers for tensor in layer.memory())
        self._targets = self._find_targets()
        self._memory = TensorMemory([self._embedding_VE, self._norm_E, *layers, *self._head.memory()])
        self._model: Model | None = self._native()
        """None while there are no weights."""
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def targets(self) -> Mapping[str, Target]:
        return self._targets

    def forward(self, ids_T: Tensor, positions_T: Tensor, pages: Tensor, batch: PrefillBatch | DecodeBatch) -> Tensor:
        if isinstance(batch, PrefillBatch):
            tables, offsets = batch.tables_SP, batch.cu_queries.data_ptr()
            assert sum(batch.query_lengths) == len(ids_T), f"{len(ids_T)} rows, of which some are padding"
        else:
            tables, offsets = batch.tables_BP, None
            assert len(tables) == len(ids_T), f"{len(ids_T)} rows of {len(tables)} sequences"
        rows, model = len(ids_T), self._loaded()
        assert rows, "no rows"
        assert pages.dtype is self.dtype, pages.dtype
        assert tables.is_contiguous()
        _assert_within("token ids", ids_T, self.spec.vocab_size)
        _assert_within("positions", positions_T, min(len(self._rope.cos_Ch), tables.shape[1] * pages.shape[3]))
        _assert_within("pages", tables, len(pages))
        hidden_TE = torch.empty((rows, self.spec.hidden), dtype=self.dtype)
        need = self._kernels.workspace_bytes(model, bf16=self._bf16, rows=rows)
        if need > len(self._workspace):
            self._workspace = torch.empty(need, dtype=torch.uint8)
        self._kernels.forward(
            model,
            Pages(
                base=pages.data_ptr(),
                page_stride=pages.stride(0),
                layer_stride=pages.stride(1),
                page_tokens=pages.shape[3],
            ),
            Batch(
                rows=rows,
                sequences=len(tables),
                table_width=tables.shape[1],
                ids=ids_T.data_ptr(),
                positions=positions_T.data_ptr(),
                tables=tables.data_ptr(),
                offsets=offsets,
            ),
            bf16=self._bf16,
            workspace=self._workspace.data_ptr(),
            hidden=hidden_TE.data_ptr(),
        )
        return hidden_TE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        rows, model = len(hidden_RE), self._loaded()
        assert rows, "no rows to predict from"
        hidden_RE = hidden_RE.contiguous()
        out = torch.empty((rows, self._head.columns), dtype=self.dtype)
        self._kernels.logits(model, bf16=self._bf16, hidden=hidden_RE.data_ptr(), rows=rows, out=out.data_ptr())
        return out[:, : self.spec.vocab_size]

    def release(self) -> int:
        self._model = None
        return self._memory.release()

    @torch.inference_mode()
    def reclaim(self) -> None:
        self._memory.reclaim()
        for linear in (self._head, *(each for layer in self._layers for each in layer.linears())):
            linear.clear_padding()
        self._model = self._native()

    def close(self) -> None:
        self._kernels.close()

    def _loaded(self) -> Model:
        assert self._model is not None, "the weights were released"
        return self._model

    def _find_targets(self) -> Mapping[str, Target]:
        targets: dict[str, Target] = {"model.norm.weight": Whole(self._norm_E)}
        if self.spec.tied_embeddings:
            targets["model.embed_tokens.weight"] = self._head.weight("head", copy_YX=self._embedding_VE)
        else:
            targets["model.embed_tokens.weight"] = Whole(self._embedding_VE)
            targets["lm_head.weight"] = self._head.weight("head")
        for index, layer in enumerate(self._layers):
            targets |= {f"model.layers.{index}.{name}": target for name, target in layer.targets().items()}
        return targets

    def _native(self) -> Model:
        """Where everything is now."""
        spec = self.spec
        return Model(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            layers=spec.layers,
            hidden=spec.hidden,
            intermediate=spec.intermediate,
            eps=spec.norm_eps,
            embedding=self._embedding_VE.data_ptr(),
            norm=self._norm_E.data_ptr(),
            cos=self._rope.cos_Ch.data_ptr(),
            sin=self._rope.sin_Ch.data_ptr(),
            layer=(Layer * spec.layers)(*[layer.native() for layer in self._layers]),
            head=self._head.native(),
        )


def _assert_within(what: str, numbers: Tensor, end: int) -> None:
    """The kernels would read and write elsewhere."""
    least, most = int(numbers.min()), int(numbers.max())
    assert 0 <= least <= most < end, f"{what} {least} … {most}, allowed: 0 … {end - 1}"


def refusal(spec: ModelSpec) -> str | None:
    """Why the native kernels cannot run this model; None if they can."""
    odd = {name: getattr(spec, name) for name in ("hidden", "intermediate") if getattr(spec, name) % 2}
    if odd:
        return f"got {odd}, allowed: even sizes"
    if spec.heads // spec.kv_heads > MOST_GROUPS:
        return f"got {spec.heads // spec.kv_heads} query heads per KV head, allowed: {MOST_GROUPS}"
    return None
