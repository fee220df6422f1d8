"""What parts of the service tell each other about themselves. Frozen values."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from rollout.config import Config
from rollout.control.messages import WorkerEvent, WorkerFacts
from rollout.kv.keys import Fingerprint
from rollout.text import TokenizerFiles
from rollout.types import NodeId, Weights, WorkerId

NAMESPACE = "rollout"
"""Ray namespace of the named actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """One worker process that has loaded its model."""

    worker: WorkerId
    node: NodeId
    incarnation: str
    """Fresh for every process."""
    fingerprint: Fingerprint
    page_tokens: int
    token_bytes: int
    """KV of one token, all layers."""
    max_context: int
    max_running: int
    weights: Weights
    """That it loaded by itself."""
    weights_bytes: int
    """Of all its weights."""
    digest: str
    """Of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Events of one worker, in order; repeated until the next poll acknowledges `number`."""

    incarnation: str
    number: int
    silent_s: float
    """Seconds since the engine's thread last went round."""
    events: tuple[WorkerEvent, ...]
    facts: WorkerFacts | None = None
    """As of the last event or later; None before the model is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDescription:
    """What a client needs to know of a service."""

    service_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Fresh for every start."""
    config: Config
    vocab_size: int
    max_context: int
    generation_defaults: dict[str, Any]
    tokenizer: TokenizerFiles


def controller_name(service: str) -> str:
    return f"{service}:controller"


def pool_name(service: str, node: NodeId) -> str:
    return f"{service}:pool:{node}"
