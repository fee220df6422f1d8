"""Where the KV of what a sequence knows can come from: the device, then the host, then a pool or its own tail."""

from dataclasses import dataclass

from rollout.engine.images import Images
from rollout.engine.live import LiveWeights
from rollout.engine.rates import Rates
from rollout.engine.sequence import Sequence
from rollout.kv.cache import KVCache, Stored
from rollout.kv.kept import Kept
from rollout.kv.nodes import ID_BYTES
from rollout.kv.tiers import Tier
from rollout.kv.written import Written
from rollout.types import KVRun, first_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Pages of the prefix tree and tokens of an image; what is behind all of them is computed."""

    stored: Stored
    wanted: int
    """Pages that were looked for."""
    device: int
    host: int
    """After these, to be loaded."""
    tail: Kept | None
    """What the trajectory left here, if that continues these pages and has more than the pool."""
    image_tokens: int
    """Of the pool's image, as far as it goes with the rest."""
    known_tokens: int
    """Of all these together."""
    written: Written
    """By which weights these were, and what follows will be."""
    page_tokens: int

    @property
    def stored_tokens(self) -> int:
        return (self.device + self.host) * self.page_tokens

    @property
    def arriving(self) -> bool:
        """The next page is just being loaded for another sequence."""
        return self.stored.arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """By which weights KV was written that a sequence may go on with, and what of it is here and in the pool."""

    runs: tuple[KVRun, ...]
    left: Kept | None
    image_tokens: int


def find_sources(
    sequence: Sequence, cache: KVCache, images: Images, rates: Rates, live: LiveWeights, *, unit: int
) -> Sources:
    """Decide what to use of what there is; changes nothing.

    Where prefill goes on in the middle of the prompt, it does so at a multiple of `unit` tokens.
    """
    history = _history(sequence, images, live)
    sources = _follow(history, sequence, cache, rates, live, unit=unit)
    if history.runs and not sources.known_tokens and not sources.arriving:  # nothing of it is left
        return _follow(_History(runs=(), left=None, image_tokens=0), sequence, cache, rates, live, unit=unit)
    return sources


def _follow(
    history: _History, sequence: Sequence, cache: KVCache, rates: Rates, live: LiveWeights, *, unit: int
) -> Sources:
    """What there is for a sequence that goes on from KV with this history."""
    page_tokens = cache.page_tokens
    runs, left, image_tokens = history.runs, history.left, history.image_tokens
    wanted = Written.continued(runs, live.weights).pure(sequence.reusable_end) // page_tokens
    root = runs[0].weights if runs else live.weights
    stored = cache.stored(root.weights_id, sequence.key_of(wanted * page_tokens), wanted)
    found = stored.device + stored.host if sequence.loadable else stored.device
    if (
        found > stored.device
        and image_tokens < found * page_tokens
        and not _worth_loading(sequence, left, rates, (found - stored.device) * page_tokens, found * page_tokens)
    ):
        found = stored.device
    here = _tail_end(left, found, page_tokens)
    if max(found * page_tokens, here, image_tokens) < sequence.prompt_tokens:
        found = found * page_tokens // unit * unit // page_tokens
        here = _tail_end(left, found, page_tokens)
    device = min(stored.device, found)
    known = max(found * page_tokens, here, image_tokens)
    return Sources(
        stored=stored,
        wanted=wanted,
        device=device,
        host=found - device,
        tail=left if here > image_tokens else None,
        image_tokens=image_tokens,
        known_tokens=known,
        written=Written.continued(first_tokens(runs, known), live.weights),
        page_tokens=page_tokens,
    )


def _history(sequence: Sequence, images: Images, live: LiveWeights) -> _History:
    """Of two images with different histories that of more tokens."""
    here = images.of(sequence.trajectory_id)
    left, left_runs = here if here is not None else (None, ())
    image_runs = sequence.image.written if sequence.image is not None else ()
    if not live.may_use(image_runs):
        image_runs = ()
    runs = max(left_runs, image_runs, key=_tokens)
    if first_tokens(runs, _tokens(image_runs)) != image_runs:
        image_runs = ()
    if first_tokens(runs, _tokens(left_runs)) != left_runs:
        left = None
    return _History(runs=runs, left=left, image_tokens=_tokens(image_runs))


def _tokens(runs: tuple[KVRun, ...]) -> int:
    return sum(run.tokens for run in runs)


def _worth_loading(sequence: Sequence, left: Kept | None, rates: Rates, tokens: int, end: int) -> bool:
    """Whether `tokens` tokens up to position `end` are loaded rather than computed again.

    What was told to stay on the host is, and so is what only decode steps may write: they take one token a step.
    """
    kept = left is not None and left.tier is Tier.HOST
    replayed = sequence.replays and end > sequence.prompt_tokens
    return kept or replayed or rates.worth_loading(tokens)


def _tail_end(left: Kept | None, pages: int, page_tokens: int) -> int:
    """Tokens that a sequence has with a tail that follows `pages` pages; 0 if there is none such."""
    follows = left is not None and bool(left.tail) and len(left.key) == pages * page_tokens * ID_BYTES
    return left.tokens if left is not None and follows else 0
