"""The configuration of a service and of a run: one frozen section per component, read from YAML.

A file is a mapping of sections; `--set a.b=value` changes one field before validation, its value
read as YAML. Unknown keys are refused. Every failure is a `ConfigError` of one line.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from rollout.errors import ConfigError, InvalidSamplingError
from rollout.types import SamplingParams


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )


S = TypeVar("S", bound=Section)


class ModelConfig(Section):
    path: Path
    """Hugging Face directory: config.json, safetensors, tokenizer.json."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, activations and KV. Logits and log-probabilities are always fp32."""


class EngineConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if the worker has a GPU."""
    kernels: Literal["auto", "native", "torch", "flash"] = "auto"
    """What runs the decoder. native: C++ of our own for the CPU, compiled at the first start on a machine; flash:
    torch with flash-attn, on cuda in bfloat16; torch: plain torch, anywhere. auto: flash on cuda and native on a CPU,
    or torch, with a warning, where that is not possible."""
    page_tokens: PositiveInt | None = None
    """Tokens in a KV page; null: 16, or 256 with flash, which needs a multiple of 256."""
    kv_bytes: ByteSize | None = None
    """Device memory for KV; null: 1 GiB on CPU, 85 % of what the weights leave free on CUDA."""
    max_running: PositiveInt = 32
    """Sequences in the decode batch; in deterministic mode without native kernels also its fixed size."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Longest prompt + output; null: the model's limit. Never more than fits in kv_bytes."""
    chunk_tokens: PositiveInt | None = None
    """Longest piece of one sequence prefilled in a step; null: 128, or page_tokens if that is more. In
    deterministic mode without native kernels a multiple of page_tokens."""
    prefill_tokens: PositiveInt = 512
    """Most prompt tokens prefilled in one step, over all sequences."""
    eviction: Literal["lru", "shared_first"] = "lru"
    """What leaves the KV cache when pages run out: the least recently used, or, with shared_first staying longest,
    pages that only one trajectory ever used before those of shared prompts."""
    tail_hold_s: PositiveFloat = 60.0
    """Seconds for which the last, partly filled page of a trajectory kept on the device is held for its return."""
    canary: bool = False
    """Check before every forward that each page of KV is the one that its sequence wrote. Slow; to find faults."""
    deterministic: bool = False
    """Make resumed equal uninterrupted bit for bit. Costs nothing with native kernels, padding with the others."""


class WriteThrough(Section):
    kind: Literal["write_through"]
    """Copy pages to the host as soon as the prefix tree has them."""


class WriteThroughSelective(Section):
    kind: Literal["write_through_selective"]
    """Copy pages to the host once they were found `hits` times."""
    hits: PositiveInt = 2


class WriteBack(Section):
    kind: Literal["write_back"]
    """Copy pages to the host when they are evicted from the device: a page is in one of the two."""


class NoWrites(Section):
    kind: Literal["none"]
    """The prefix tree never uses the host; trajectories suspended with `keep: host` do."""


WritePolicy = WriteThrough | WriteThroughSelective | WriteBack | NoWrites


class HostConfig(Section):
    bytes: ByteSize = ByteSize(0)
    """Memory of each worker for a second tier of its KV cache; pinned with CUDA. 0: there is none."""
    write: Annotated[WritePolicy, Field(discriminator="kind")] = WriteThroughSelective(kind="write_through_selective")
    """When pages of the prefix tree are copied to the host."""
    load_back_tokens: int | None = Field(default=None, ge=0)
    """A prefix found on the host is computed again if it is shorter than this; null: where copying takes longer
    than computing, by the rates measured on the running worker."""


class ClusterConfig(Section):
    name: str = Field(default="rollout", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Of the service; `connect(name)` finds it."""
    address: str | None = None
    """Ray cluster to join; null: the running one (RAY_ADDRESS, or inside a Ray job), else a local one."""
    workers: PositiveInt = 1
    """Decode workers."""
    cpus_per_worker: PositiveInt = 1
    """Cores, and threads, of each worker."""
    gpus_per_worker: Literal[0, 1] = 0
    """GPUs of each worker."""
    max_restarts: int = Field(default=3, ge=0)
    """Times a dead worker process is started again."""
    start_timeout_s: PositiveFloat = 180.0
    """Seconds for placement and for all workers to load the model."""
    health_interval_s: PositiveFloat = 1.0
    """Seconds between two looks at each worker."""
    unresponsive_s: PositiveFloat = 60.0
    """Seconds without an answer after which a worker counts as lost and is killed."""


class PoolConfig(Section):
    budget_bytes: ByteSize | None = None
    """KV that the pool of one node may hold in Ray's object store; null: 2 GiB, or what the store has room for."""
    reserve_bytes: ByteSize = ByteSize(0)
    """Object-store bytes the driver itself will use on a node, such as weight buckets in flight."""
    max_object_bytes: ByteSize = ByteSize(256 << 20)
    """Longer runs of pages are split into several objects."""
    warm_bytes: ByteSize = ByteSize(64 << 20)
    """Shared memory each worker touches at start, since a first touch is several times slower. As much of the node's
    memory is taken at once."""
    export_timeout_s: PositiveFloat = 30.0
    """Seconds from leaving the batch until the KV is in the pool; then it is dropped and recomputed."""
    restore_timeout_s: PositiveFloat = 30.0
    """Seconds to read an image from the pool; then it is recomputed."""


KeepName = Literal["auto", "device", "host", "pool", "none"]
ThenName = Literal["requeue", "hold", "finish", "retry", "drop"]


class SliceBudget(Section):
    kind: Literal["slice_budget"]
    tokens: PositiveInt
    """Sampled by a trajectory before it is stopped: a divided rollout."""
    keep: KeepName = "auto"
    then: ThenName = "requeue"


class OverLong(Section):
    """Stops a trajectory once."""

    kind: Literal["over_long"]
    tokens: PositiveInt | None = None
    """Sampled tokens that are too many; null: any number."""
    factor: float | None = Field(default=None, gt=1)
    """Times the median length of the finished members is too many; null: no comparison."""
    of: Literal["group", "batch"] = "group"
    """Whose finished members: those of the same prompt, or of the same `submit`."""
    min_finished: PositiveInt = 2
    """So many must be finished before lengths are compared."""
    keep: KeepName = "auto"
    then: ThenName = "hold"

    @model_validator(mode="after")
    def _something_is_too_long(self) -> "OverLong":
        if self.tokens is None and self.factor is None:
            raise ValueError("tokens: got neither tokens nor factor; one of them is needed")
        return self


class Deadline(Section):
    kind: Literal["deadline"]
    seconds: PositiveFloat
    """From submission, by the wall clock."""
    keep: KeepName = "none"
    then: ThenName = "finish"


class Stale(Section):
    kind: Literal["stale"]
    behind: PositiveInt | None = None
    """Versions between the first token of a trajectory and the live weights that are too many; null: any number."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Of its tokens that may be older than `age` versions; null: all."""
    age: PositiveInt = 1
    """Versions after which a token counts as old for `share`."""
    keep: KeepName = "none"
    then: ThenName = "retry"

    @model_validator(mode="after")
    def _something_is_stale(self) -> "Stale":
        if self.behind is None and self.share is None:
            raise ValueError("behind: got neither behind nor share; one of them is needed")
        return self


class Quota(Section):
    """Applies to `collect`, with or without this entry, which says what becomes of the rest."""

    kind: Literal["quota"]
    keep: KeepName = "auto"
    then: Literal["hold"] = "hold"


class Tail(Section):
    kind: Literal["tail"]
    share: float = Field(default=0.1, gt=0, lt=1)
    """Of the trajectories of one `submit`: once all others are over, this last share is stopped."""
    keep: KeepName = "auto"
    then: ThenName = "hold"


class Memory(Section):
    """Stops the youngest trajectory of a worker that is short of pages, one at a time."""

    kind: Literal["memory"]
    free_share: float = Field(default=0.05, gt=0, lt=1)
    """Of a worker's device pages: fewer that are free, or may be evicted, are too few."""
    keep: KeepName = "auto"
    then: ThenName = "requeue"


class Repetition(Section):
    kind: Literal["repetition"]
    ngram: PositiveInt = 64
    """Longest piece that is looked for, in tokens."""
    times: int = Field(default=8, ge=2)
    """So often in a row it is a loop."""
    min_tokens: PositiveInt = 64
    """Least length of the whole loop."""
    keep: KeepName = "none"
    then: ThenName = "finish"


Policy = Annotated[
    SliceBudget | OverLong | Deadline | Stale | Quota | Tail | Memory | Repetition, Field(discriminator="kind")
]


class AbortConfig(Section):
    keep: KeepName = "auto"
    """What `keep: auto` means: auto: where the cost model says; otherwise always there."""
    policies: tuple[Policy, ...] = ()
    """What stops trajectories, one of each kind at most. Each entry says what becomes of the KV (`keep`) and of the
    trajectory (`then`)."""

    @model_validator(mode="after")
    def _one_of_a_kind(self) -> "AbortConfig":
        kinds = [policy.kind for policy in self.policies]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(f"policies: got {', '.join(twice)} more than once, allowed: one of each kind")
        return self

    def policy(self, kind: type[S]) -> S | None:
        """The policy of this kind, if there is one."""
        return next((policy for policy in self.policies if isinstance(policy, kind)), None)


class ResumeConfig(Section):
    prefer: Literal["cheapest", "most_room", "other"] = "cheapest"
    """Where a trajectory starts or resumes: where it is expected to be done soonest, counting what KV is there, what
    would be read or computed and how full the worker is; on the least loaded; or, if it can, on another worker than
    its last."""
    order: Literal["oldest", "longest"] = "oldest"
    """Who starts first: the oldest, or the one expected to have most tokens to go, by its group's finished members."""
    max_resumes: PositiveInt | None = 64
    """Resumes after which policies leave a trajectory alone, so that it ends; null: any number."""


class GroupsConfig(Section):
    failed_member: Literal["keep", "retry", "replace", "fail"] = "keep"
    """What a member that failed does to its group. keep: it is handed out with the others; retry: it goes on from its
    tokens; replace: it begins again with other draws; fail: the others are stopped and the group carries the error."""
    max_retries: PositiveInt = 1
    """Retries or replacements of one member, after which its group fails."""
    rest: Literal["abort", "withhold"] = "abort"
    """What `collect` does with what is not finished when it has enough: abort suspends it until the next call,
    withhold lets it run on and hands it out then."""


class DriverConfig(Section):
    max_outstanding: PositiveInt = 100_000
    """Trajectories that were submitted and not handed out; `submit` waits, or raises `ServiceBusyError`, beyond it."""
    stall_timeout_s: PositiveFloat = 300.0
    """Seconds in which nothing goes on although something could, after which waiting calls raise `StalledError`."""


class ObjectStore(Section):
    """The trainer puts weights into Ray's object store, once; every worker reads them there."""

    kind: Literal["object_store"]
    bucket_bytes: ByteSize = ByteSize(32 << 20)
    """Of one object, if no tensor is bigger. Workers read it where it is, in shared memory."""


class Disk(Section):
    """The trainer names a directory of safetensors, or has tensors written to one; every worker reads it."""

    kind: Literal["disk"]
    path: Path | None = None
    """A directory that every node sees, for tensors that `update_weights` is given: each update has one of its own
    there, which goes when the next is live. null: it is given directories only."""


class Collective(Section):
    """The trainer broadcasts weights to all workers with torch.distributed."""

    kind: Literal["collective"]
    bucket_bytes: ByteSize = ByteSize(32 << 20)
    """Of one broadcast, if no tensor is bigger; two are under way at a time."""
    staged: bool = True
    """Workers hold all of the new weights beside the old ones before any of these is touched. Without that a worker
    which fails to receive is fenced, and loads anew."""


class SameWeights(Section):
    """A trajectory goes on only with KV that the live weights wrote; other KV is computed again."""

    kind: Literal["same_weights"]


class StaleKV(Section):
    """A trajectory goes on with its own KV of earlier weights, and nobody else's."""

    kind: Literal["stale"]
    max_lag: PositiveInt = 1
    """Updates since it was written, after which KV is not used any more."""


KVReuse = SameWeights | StaleKV


class WeightsConfig(Section):
    transport: Annotated[ObjectStore | Disk | Collective, Field(discriminator="kind")] = ObjectStore(
        kind="object_store"
    )
    """How `update_weights` brings tensors to the workers. A directory is read from disk in any case."""
    mode: Literal["recompute", "in_place", "suspend", "finish"] = "recompute"
    """What an update does to running trajectories, unless it says: their KV is computed again with the new weights;
    they go on with what they have (needs kv_reuse: stale); they are suspended before and resumed after; they end
    before, and nothing starts until then."""
    kv_reuse: Annotated[KVReuse, Field(discriminator="kind")] = SameWeights(kind="same_weights")
    """Whether KV that other weights wrote may be used at all."""
    timeout_s: PositiveFloat = 300.0
    """Of an update, after which it fails and names the worker that did not answer, unless it says otherwise."""
    version_timeout_s: PositiveFloat = 600.0
    """For which a trajectory waits for the version that it asks for, after which it fails."""

    @model_validator(mode="after")
    def _in_place_reuses(self) -> "WeightsConfig":
        if self.mode == "in_place" and self.kv_reuse.kind == "same_weights":
            raise ValueError("mode: got in_place, which needs kv_reuse: stale")
        return self


class SamplingConfig(Section):
    """`types.SamplingParams` as a section; null fields come from the model's generation_config.json."""

    temperature: float | None = None
    """0 is greedy; null: the model's, else 1."""
    top_k: int | None = None
    """0 keeps all; null: the model's, else 0."""
    top_p: float | None = None
    """1 keeps all; null: the model's, else 1."""
    max_new_tokens: int = 128
    """Cumulative over suspensions."""
    min_new_tokens: int = 0
    """Stop ids cannot be drawn before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids."""
    seed: int | None = None
    """Null: draws follow run.seed and each prompt's key."""

    def resolve(self, model_defaults: Mapping[str, Any] = {}) -> SamplingParams:
        """Sampling parameters, null fields taken from `model_defaults` (generation_config.json)."""
        if not model_defaults.get("do_sample", True):
            model_defaults = {}
        values = self.model_dump()
        for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            if values[name] is None:
                default = model_defaults.get(name)
                values[name] = neutral if default is None else default
        return SamplingParams(**values)

    @model_validator(mode="after")
    def _ranges(self) -> "SamplingConfig":
        try:
            self.resolve()
        except InvalidSamplingError as error:
            raise ValueError(str(error)) from None
        return self


class FilePrompts(Section):
    kind: Literal["file"]
    path: Path
    """JSONL or Parquet (by suffix), one prompt a row."""
    column: str = "prompt"
    """Holds a string, a list of chat messages or a list of token ids."""
    key_column: str | None = None
    """Names each prompt; null: its row number."""
    limit: PositiveInt | None = None
    """First rows to use; null: all."""


class ReasoningGymPrompts(Section):
    kind: Literal["reasoning_gym"]
    dataset: str
    """Name of a reasoning-gym data set, such as chain_sum."""
    size: PositiveInt = 16
    """Number of prompts."""
    seed: int = 0
    """Of the data set."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the data set."""


PromptsConfig = Annotated[FilePrompts | ReasoningGymPrompts, Field(discriminator="kind")]


class RunConfig(Section):
    prompts: PromptsConfig | None = None
    """What `rollout run` rolls out."""
    samples: PositiveInt = 1
    """Trajectories of each prompt (its group)."""
    chat: bool = True
    """Wrap string prompts as one user message in the model's chat template, where it has one."""
    seed: int = 0
    """Of all draws, with each prompt's key."""
    out: Path = Path("rollouts.parquet")
    """Where the trajectories are written."""


class Config(Section):
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    host: HostConfig = HostConfig()
    cluster: ClusterConfig = ClusterConfig()
    pool: PoolConfig = PoolConfig()
    abort: AbortConfig = AbortConfig()
    resume: ResumeConfig = ResumeConfig()
    groups: GroupsConfig = GroupsConfig()
    driver: DriverConfig = DriverConfig()
    weights: WeightsConfig = WeightsConfig()
    sampling: SamplingConfig = SamplingConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _host_is_there(self) -> "Config":
        keeps = {"abort.keep": self.abort.keep}
        keeps |= {f"abort.policies.{policy.kind}.keep": policy.keep for policy in self.abort.policies}
        for field, keep in keeps.items():
            if keep == "host" and not self.host.bytes:
                raise ValueError(f"{field}: got host, which needs host.bytes > 0")
        return self


def load_config(source: Path | str | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Read and validate a configuration; `overrides` are `a.b=value` strings.

    Raises `ConfigError` for a missing or malformed file, an unknown key or a bad value.
    """
    if isinstance(source, Mapping):
        return load_section(Config, source, overrides, where="config")
    return load_file(Config, Path(source), overrides)


def load_file(kind: type[S], path: Path, overrides: Iterable[str] = ()) -> S:
    """As `load_config`, of a section of a driver's own, which may hold a `Config`."""
    return load_section(kind, _read_yaml(path), overrides, where=str(path))


def load_section(kind: type[S], raw: Mapping[str, Any], overrides: Iterable[str], *, where: str) -> S:
    """Validate `raw` as a section; `where` is what an error calls its origin.

    Raises `ConfigError` for an unknown key or a bad value.
    """
    values = dict(raw)
    for override in overrides:
        values = _with_override(values, override)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_one_line(error)}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(raw).__name__}")
    return raw


def _with_override(raw: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `raw` with `a.b=value` applied; intermediate sections are created."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r}: expected a.b=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML") from None
    result = dict(raw)
    section = result
    for key in keys[:-1]:
        inner = section.get(key)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {key!r} is a value, not a section")
        section[key] = section = dict(inner or {})
    section[keys[-1]] = value
    return result


def _one_line(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            parts.append(f"{place}: unknown key")
        elif item["type"] == "value_error":
            parts.append(f"{place}.{item['ctx']['error']}")
        else:
            got = "" if item["type"] in ("missing", "union_tag_not_found") else f" (got {item['input']!r:.80})"
            parts.append(f"{place}: {item['msg']}{got}")
    return "; ".join(parts)
