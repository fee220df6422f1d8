"""Where the KV of what a sequence knows can come from: the device, then the host, then a pool or its own tail."""

from dataclasses import dataclass

from rollout.engine.images import Images
from rollout.engine.rates import Rates
from rollout.engine.sequence import Sequence
from rollout.kv.cache import KVCache, Stored
from rollout.kv.kept import Kept
from rollout.kv.tiers import Tier


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
    """Of the pool's image."""
    page_tokens: int

    @property
    def stored_tokens(self) -> int:
        return (self.device + self.host) * self.page_tokens

    @property
    def arriving(self) -> bool:
        """The next page is just being loaded for another sequence."""
        return self.stored.arriving


def find_sources(sequence: Sequence, cache: KVCache, images: Images, rates: Rates, *, unit: int) -> Sources:
    """Decide what to use of what there is; changes nothing.

    Where prefill goes on in the middle of the prompt, it does so at a multiple of `unit` tokens.
    """
    page_tokens = cache.page_tokens
    wanted = sequence.reusable_end // page_tokens
    stored = cache.stored(sequence.weights_id, sequence.key_of(wanted * page_tokens), wanted)
    image_tokens = sequence.image.kv_tokens if sequence.image is not None else 0
    left = images.of(sequence.trajectory_id, sequence.weights_id)
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
    return Sources(
        stored=stored,
        wanted=wanted,
        device=device,
        host=found - device,
        tail=left if here > image_tokens else None,
        image_tokens=image_tokens,
        page_tokens=page_tokens,
    )


def _worth_loading(sequence: Sequence, left: Kept | None, rates: Rates, tokens: int, end: int) -> bool:
    """Whether `tokens` tokens up to position `end` are loaded rather than computed again.

    What was told to stay on the host is, and so is what only decode steps may write: they take one token a step.
    """
    kept = left is not None and left.tier is Tier.HOST
    replayed = sequence.replays and end > sequence.prompt_tokens
    return kept or replayed or rates.worth_loading(tokens)


def _tail_end(left: Kept | None, pages: int, page_tokens: int) -> int:
    """Tokens that a sequence has with a tail that follows `pages` pages; 0 if there is none such."""
    follows = left is not None and bool(left.tail) and left.tokens // page_tokens == pages
    return left.tokens if left is not None and follows else 0
