"""A worker's cache and tensors with trajectories that use them as an engine would, and all that must hold then.

Copies, exports and restores are under way until somebody says that they are over, in whatever order. Every
page that anybody may read holds what the model of `contents` says, every page that nobody owns is poisoned.
"""

from rollout.config import WritePolicy
from rollout.kv.cache import KVCache, Stored
from rollout.kv.fence import Passed
from rollout.kv.holding import Holding
from rollout.kv.kept import Kept
from rollout.kv.nodes import ID_BYTES, Node, edge_bytes
from rollout.kv.tiers import Tier
from rollout.kv.written import Written
from rollout.types import KVRun, TrajectoryId, Weights, first_tokens
from tests.kv.claims import claims_of_image, claims_of_pages, claims_of_tree, weights_of
from tests.kv.contents import Contents
from tests.kv.flights import Flights
from tests.kv.trajectories import Export, Pooled, Run, Trajectory

PAGE = 2
TAIL_HOLD_S = 5.0


class TierWorld:
    """The methods are what may happen; each leaves everything consistent, which `check` asserts."""

    def __init__(
        self, *, device_pages: int, host_pages: int, write: WritePolicy, prefer_shared: bool, max_lag: int
    ) -> None:
        """A trajectory may go on with KV that the last `max_lag` loads of weights before the live ones wrote."""
        self.cache = KVCache(device_pages, PAGE, host_pages=host_pages, write=write, prefer_shared=prefer_shared)
        self.contents = Contents(device_pages=device_pages, host_pages=host_pages, page_tokens=PAGE)
        self.max_lag = max_lag
        self.loads = [weights_of("w0")]
        self.histories: dict[Kept, tuple[KVRun, ...]] = {}
        """By which weights images were written, as long as they were."""
        self.now = 0.0
        self.trajectories: list[Trajectory] = []
        self.runs: list[Run] = []
        self.flights = Flights(self.cache, self.contents)
        self.exports: list[Export] = []
        self.outdated: list[Kept] = []
        """Images that are to be dropped as soon as nothing reads or moves them."""
        self.moving: dict[Kept, Tier] = {}
        self.hits = dict.fromkeys(Tier, 0)
        self.misses = dict.fromkeys(Tier, 0)
        self.serial = 0
        self.texts: dict[TrajectoryId, list[int]] = {}
        """Tokens of everybody who was ever here."""

    @property
    def live(self) -> Weights:
        return self.loads[-1]

    @property
    def reusable(self) -> set[str]:
        return {weights.weights_id for weights in self.loads[-self.max_lag - 1 :]}

    def may_use(self, runs: tuple[KVRun, ...]) -> bool:
        return all(run.weights.weights_id in self.reusable for run in runs)

    def runs_of(self, kept: Kept) -> tuple[KVRun, ...]:
        """Of an image, as far as it has not lost anything."""
        tokens = kept.tokens if kept.tail else len(kept.key) // ID_BYTES
        return first_tokens(self.histories[kept], tokens)

    def key(self, tokens: list[int], pages: int) -> bytes:
        return edge_bytes(tokens[: pages * PAGE])

    # Sequences ----------------------------------------------------------------------------------------

    def submit(self, prompt: tuple[int, ...]) -> None:
        self.serial += 1
        trajectory = Trajectory(name=TrajectoryId(f"t{self.serial}"), tokens=[*prompt])
        self.texts[trajectory.name] = trajectory.tokens
        self.trajectories.append(trajectory)

    def stored(self, tokens: list[int], pages: int, weights_id: str | None = None) -> Stored:
        """What the tree says it has; looking changes nothing."""
        before = [(node, node.used_at, node.hits, node.owner) for node in self.cache._tree.nodes()]
        found = self.cache.stored(weights_id or self.live.weights_id, self.key(tokens, pages), pages)
        assert [(node, node.used_at, node.hits, node.owner) for node in self.cache._tree.nodes()] == before
        assert found.evictable <= found.device <= found.device + found.host <= pages
        return found

    def admit(self, trajectory: Trajectory, *, from_host: bool, from_pool: bool) -> None:
        """Begin or continue a trajectory with what there is of its KV, if there is room for all it needs."""
        cache, tokens = self.cache, trajectory.tokens
        image = self.idle(trajectory)
        mine = image if image is not None and self.may_use(self.histories[image]) else None
        pooled = trajectory.pooled if from_pool else None
        runs = self.runs_of(mine) if mine is not None else ()
        if pooled is not None and not self.may_use(pooled.runs):
            pooled = None
        if pooled is not None:
            longer, shorter = sorted((runs, pooled.runs), key=tokens_of, reverse=True)
            if first_tokens(longer, tokens_of(shorter)) == shorter:
                runs = longer
            elif runs:
                pooled = None
        first = runs[0].weights if runs else self.live
        purely = Written.continued(runs, self.live).pure(len(tokens) - 1)
        wanted, pages = purely // PAGE, cache.pages_for(len(tokens))
        found = self.stored(tokens, wanted, first.weights_id)
        if found.arriving:
            return
        if mine is not None and mine.tier is Tier.HOST:
            assert found.device + found.host >= len(mine.key) // (PAGE * ID_BYTES), "an image on the host lost pages"
        ready = found.device + found.host if from_host else found.device
        tail = mine if mine is not None and mine.tail and len(mine.key) == ready * PAGE * ID_BYTES else None
        restored = pooled if tail is None and pooled is not None and pooled.tokens > ready * PAGE else None
        known = tail.tokens if tail is not None else restored.tokens if restored is not None else ready * PAGE
        written = Written.continued(first_tokens(runs, known), self.live)
        key, available = self.key(tokens, ready), cache.available
        holding = cache.open(trajectory.name, written.first.weights_id, key, found.device)
        assert len(holding.table) == holding.shared == found.device
        assert cache.available == available - found.evictable, "what opening costs is not what looking said"
        room = pages - found.device
        if tail is not None:
            room -= len(tail.tail.get(Tier.DEVICE, ()))
            cache.kept.hold_tail(tail, held=True)
        roomy = cache.load(holding, key, ready, room=room) if ready > found.device else cache.make_room(room)
        if not roomy:
            assert not holding.loads
            cache.close(holding)
            if tail is not None:
                cache.kept.hold_tail(tail, held=False)
            return
        self.count(holding, found, wanted)
        run = Run(holding=holding, kv=ready * PAGE, written=written)
        self.runs.append(run)
        trajectory.run = run
        if tail is not None:
            run.kv = tail.tokens
            cache.adopt(tail, holding)
            trajectory.image = None
        elif image is not None:
            cache.kept.forget(image)
            trajectory.image = None
        if restored is not None:
            self.restore(run, restored)
        assert cache.grow(holding, pages), "room that was made is gone"

    def count(self, holding: Holding, found: Stored, wanted: int) -> None:
        self.cache.admitted(holding, found, wanted)
        self.hits[Tier.DEVICE] += found.device
        self.hits[Tier.HOST] += found.host
        self.misses[Tier.DEVICE] += wanted - found.device
        self.misses[Tier.HOST] += wanted - found.device - found.host

    def restore(self, run: Run, pooled: Pooled) -> None:
        first, pages = len(run.holding.table), self.cache.pages_for(pooled.tokens)
        if first < pages:
            assert self.cache.grow(run.holding, pages, reserved=True), "room that was made is gone"
            run.restoring = pooled, first, run.holding.table[first:]

    def grow(self, run: Run, pages: int) -> bool:
        before, available = [*run.holding.table], self.cache.available
        flights = self.cache.tiered.flights
        grown = self.cache.grow(run.holding, pages)
        more = pages - len(before)
        assert run.holding.table[: len(before)] == before
        assert len(run.holding.table) == len(before) + (max(0, more) if grown else 0)
        if more > available:
            assert not grown, "pages that cannot be had"
        elif not grown:
            assert flights or self.cache.tiered.flights, "no room, and no copy that would make some"
        return grown

    def restored(self, run: Run, *, ok: bool) -> None:
        """A restore is over, with part of it written if it failed."""
        assert run.restoring is not None
        pooled, first, pages = run.restoring
        run.restoring = None
        tokens = pooled.tokens - first * PAGE
        if not ok:
            tokens, pages = min(tokens, PAGE), pages[:1]
        buffers = pooled.buffers[first : first + len(pages)]
        self.contents.storage.scatter(pages, tokens, buffers, Passed())
        self.contents.canaries[Tier.DEVICE].put(pages, tokens, pooled.shadow, first=first)
        if ok:
            run.kv = pooled.tokens
        else:  # the live weights write what it was to bring
            run.written = Written.continued(run.written.until(run.kv), self.live)
            run.given_up = run.given_up or run.written.first.weights_id != run.holding.weights_id

    def step(self, trajectory: Trajectory, *, count: int, sampled: int, commit: bool, write: bool) -> None:
        """Compute up to `count` positions; where that is all, a token is sampled."""
        run, tokens = trajectory.run, trajectory.tokens
        assert run is not None
        end = min(len(tokens), run.kv + count)
        if not self.grow(run, self.cache.pages_for(end)):
            return
        assert run.kv >= run.holding.shared * PAGE, "writing into pages of the tree"
        by = run.written.until(end)
        assert by[-1].weights == self.live, "other weights than the live ones write"
        assert by[-1].tokens >= end - run.kv, "what is written anew is said to be older"
        self.contents.write(run.holding.table, by, tokens[:end], run.kv)
        run.kv = end
        if end == len(tokens):
            tokens.append(sampled)
        if commit:
            self.commit(trajectory, write=write)

    def commit(self, trajectory: Trajectory, *, write: bool) -> None:
        run = trajectory.run
        assert run is not None
        pages = run.written.pure(run.kv) // PAGE
        self.cache.commit(run.holding, self.key(trajectory.tokens, pages), write=write)
        found = self.stored(trajectory.tokens, pages, run.holding.weights_id)
        assert run.holding.shared == found.device
        assert found.device == pages or found.arriving

    def stop(self, trajectory: Trajectory) -> Kept | None:
        """Out of the batch with an image, or with nothing where a copy still writes to its pages."""
        run, trajectory.run = trajectory.run, None
        assert run is not None
        if run.busy:
            run.given_up = True
            return None
        self.runs.remove(run)
        pages = run.written.pure(run.kv) // PAGE
        kept = self.cache.park(run.holding, self.key(trajectory.tokens, pages), run.kv)
        self.histories[kept] = run.written.until(kept.tokens)
        assert kept.tokens == run.kv or self.stored(trajectory.tokens, pages, kept.weights_id).arriving
        assert len(self.cache.kept.sources(kept)) == self.cache.pages_for(kept.tokens)
        return kept

    def finish(self, trajectory: Trajectory) -> None:
        """Nobody wants it any more."""
        if trajectory.run is not None and (kept := self.stop(trajectory)) is not None:
            self.outdated.append(kept)
        if trajectory.image is not None:
            self.outdated.append(trajectory.image)
            trajectory.image = None
        self.trajectories.remove(trajectory)

    # Images -------------------------------------------------------------------------------------------

    def keep(self, trajectory: Trajectory, where: str) -> None:
        """Stop it and put its KV where the abort says, or where there is room; see `Keep`."""
        kept = self.stop(trajectory)
        if kept is None:
            return
        if trajectory.image is not None:  # was in use when it went on without
            self.outdated.append(trajectory.image)
        trajectory.image = kept
        match where:
            case "host":
                self.move(kept, Tier.HOST)
            case "pool" if kept.tokens:
                self.export(trajectory, kept)
            case "none":
                trajectory.image = None
                self.outdated.append(kept)
            case _:
                self.unpin(kept)

    def unpin(self, kept: Kept) -> None:
        self.cache.kept.unpin(kept, expires_at=self.now + TAIL_HOLD_S)

    def move(self, kept: Kept, to: Tier) -> None:
        tokens = kept.tokens
        self.cache.kept.pin(kept)
        assert kept.tokens == tokens or kept.tier is Tier.DEVICE, "an image on the host lost tokens"
        if self.cache.kept.move(kept, to):
            self.moving[kept] = to
        else:
            self.unpin(kept)

    def export(self, trajectory: Trajectory, kept: Kept) -> None:
        refs = self.cache.kept.sources(kept)
        buffers = self.contents.storage.gather(refs, kept.tokens, Passed())
        shadow = self.contents.storage.shadow(refs, kept.tokens)
        assert shadow is not None
        pooled = Pooled(runs=self.runs_of(kept), tokens=kept.tokens, buffers=buffers, shadow=shadow)
        self.exports.append(Export(trajectory=trajectory, image=kept, refs=refs, pooled=pooled))

    def exported(self, export: Export, *, refused: bool) -> None:
        """The pool has copied what it was shown, or does not want it."""
        self.exports.remove(export)
        pooled, image, trajectory = export.pooled, export.image, export.trajectory
        assert self.cache.kept.sources(image) == export.refs, "pages moved under an export"
        pooled.buffers = [buffer.copy() for buffer in pooled.buffers]
        if not refused:
            trajectory.pooled = pooled
        if refused and trajectory.image is image:
            self.unpin(image)
        elif trajectory.image is image:
            trajectory.image = None
            self.outdated.append(image)

    def idle(self, trajectory: Trajectory) -> Kept | None:
        """Its image, if nothing is under way with that."""
        image = trajectory.image
        if image is None or image in self.moving or any(export.image is image for export in self.exports):
            return None
        assert not image.pinned
        return image

    def idle_images(self) -> list[Kept]:
        return [image for trajectory in self.trajectories if (image := self.idle(trajectory)) is not None]

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self.flights.all or self.exports) or any(run.restoring for run in self.runs)

    # Everything else ----------------------------------------------------------------------------------

    def change_weights(self, *, in_place: bool, parked: bool) -> None:
        """Whoever may goes on `in_place` with what it has; all others begin again, their KV left to the tree or, if
        `parked`, dropped with an image."""
        self.loads.append(weights_of(f"w{len(self.loads)}"))
        for trajectory in self.trajectories:
            run = trajectory.run
            if run is None:
                continue
            if in_place and run.known and self.may_use(run.written.until(run.known)):
                run.written.change(run.known, self.live)
            elif parked and (kept := self.stop(trajectory)) is not None:
                self.outdated.append(kept)
            else:
                run.given_up, trajectory.run = True, None
        for trajectory in self.trajectories:
            found = self.stored(trajectory.tokens, len(trajectory.tokens) // PAGE)
            assert found == Stored(device=0, evictable=0, host=0, arriving=False)

    def purge(self) -> None:
        """Free what weights wrote whose KV is of no use any more."""
        tree = self.cache._tree
        kept = {tier: [n for n in tree.nodes() if n.at(tier).pages and n.at(tier).locks] for tier in Tier}
        mine = {name: root for name, root in tree._roots.items() if name in self.reusable}
        useful = [node for root in mine.values() for node in subtree(root)]
        before = [(node, [*node.device.pages], [*node.host.pages]) for node in useful]
        done = self.cache.tiered.purge(self.reusable)
        assert [(node, node.device.pages, node.host.pages) for node in useful] == before, "what is of use is touched"
        nodes = set(tree.nodes())
        for tier in Tier:
            assert nodes >= {*kept[tier]}
            assert all(node.at(tier).pages for node in kept[tier]), "what is held is gone"
        for node in nodes - {*useful} - {*tree._roots.values()}:
            for tier in Tier:
                free = node.at(tier).pages and not node.at(tier).locks
                assert not free or (node.children and not node.at(tier.other).pages), "kept for nothing"
        assert done == (set(tree._roots) <= self.reusable)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.cache.kept.expire(self.now)
        for kept in self.cache.kept.images():
            assert kept.pinned or kept.tier is Tier.HOST or not kept.tail or kept.expires_at > self.now

    def peek(self, trajectory: Trajectory, pages: int) -> None:
        """Another one has the same first pages, and goes away: nodes are split there."""
        self.serial += 1
        pages = min(pages, len(trajectory.tokens) // PAGE)
        owner = TrajectoryId(f"t{self.serial}")
        holding = self.cache.open(owner, self.live.weights_id, self.key(trajectory.tokens, pages), pages)
        self.cache.close(holding)

    def nobody(self) -> Run:
        """A run that has nothing."""
        holding = self.cache.open(TrajectoryId("x"), self.live.weights_id, b"", 0)
        return Run(holding=holding, kv=0, written=Written(self.live))

    def evict(self, count: int) -> None:
        """Somebody needs up to `count` pages for a moment."""
        run = self.nobody()
        self.grow(run, min(count, self.cache.available))
        self.cache.close(run.holding)

    def evict_from_host(self, count: int) -> None:
        room = self.cache.tiered.room_on_host
        assert self.cache.tiered.make_room_on_host(count) == (room >= count)

    def settle(self) -> None:
        """What an engine does in every step, whatever happened."""
        for kept, freed in self.cache.kept.take_moved(expires_at=self.now + TAIL_HOLD_S):
            to = self.moving.pop(kept)
            assert kept.tier is to or kept.failed
            assert set(kept.tail) <= {kept.tier}
            assert freed.exclusive >= freed.freed, freed
        for run in [run for run in self.runs if not run.busy]:
            self.cache.settle(run.holding)
            if run.given_up or run.holding.load_failed:
                self.cache.close(run.holding)
                self.runs.remove(run)
        for trajectory in self.trajectories:
            if trajectory.run is not None and trajectory.run not in self.runs:
                trajectory.run = None
        exported = [export.image for export in self.exports]
        for kept in [kept for kept in self.outdated if kept not in exported]:
            freed = self.cache.kept.drop(kept)
            if freed is not None:
                assert freed.exclusive == freed.freed, freed
                self.outdated.remove(kept)
            else:
                assert self.cache.tiered.flights, "an image is busy, and there is no copy"
        self.flights.launch()
        for tier in Tier:
            self.contents.own(tier, self.cache.tiered.owned(tier))

    # What must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        self.cache.audit(run.holding for run in self.runs)
        claims = claims_of_tree(self.cache._tree, PAGE)
        for run in self.runs:
            if not run.busy:
                ids = edge_bytes(self.texts[run.holding.owner][: run.kv])
                table = [(Tier.DEVICE, page) for page in run.holding.table]
                claims += claims_of_pages(table, run.written.until(run.kv), ids, PAGE)
                assert run.holding.shared * PAGE <= run.written.pure(run.kv), "pages of several weights are shared"
        images = self.cache.kept.images()
        for kept in images:
            runs = first_tokens(self.histories[kept], kept.tokens)
            claims += claims_of_image(self.cache, kept, runs, edge_bytes(self.texts[kept.owner][: kept.tokens]), PAGE)
        idle = [kept for kept in images if not kept.pinned and kept.tier is Tier.DEVICE]
        assert self.cache.kept.spare == sum(len(kept.tail.get(Tier.DEVICE, ())) for kept in idle)
        self.contents.verify(claims)
        self.contents.check_free_pages()
        for tier in Tier:
            stats = self.cache.stats(tier)
            assert (stats.hits, stats.misses) == (self.hits[tier], self.misses[tier])
            assert stats.arrived + stats.failed <= self.flights.ended[tier]

    def drain(self) -> None:
        """Everything under way comes to an end, and what that starts, too."""
        while self.busy:
            while self.flights.all:
                self.flights.complete(self.flights.all[0], ok=True)
            for export in [*self.exports]:
                self.exported(export, refused=False)
            for run in self.runs:
                if run.restoring:
                    self.restored(run, ok=True)
            self.settle()

    def end(self) -> None:
        """Nobody wants anything any more: all pages are free or can be had, and all counters are what they were."""
        self.drain()
        for trajectory in [*self.trajectories]:
            self.finish(trajectory)
        self.settle()
        self.drain()
        self.check()
        assert not self.runs
        assert not self.outdated
        assert not self.moving
        assert not self.cache.kept.images()
        assert self.cache.available == self.cache.total
        for tier in Tier:
            stats = self.cache.stats(tier)
            assert (stats.private, stats.reserved, stats.free + stats.tree) == (0, 0, stats.total)
            assert stats.arrived + stats.failed == self.flights.ended[tier]
            assert self.cache._tree.level(tier).evictable == stats.tree
        everything = self.nobody()
        while not self.grow(everything, self.cache.total):
            self.settle()
            self.drain()
        self.cache.close(everything.holding)
        assert self.cache.tiered.make_room_on_host(self.cache.tiered.total(Tier.HOST))
        self.settle()
        self.check()
        assert all(self.cache.stats(tier).free == self.cache.tiered.total(tier) for tier in Tier)
        assert self.cache.tiered.purge(set())
        assert not self.cache._tree._roots


def tokens_of(runs: tuple[KVRun, ...]) -> int:
    return sum(run.tokens for run in runs)


def subtree(root: Node) -> list[Node]:
    """All below."""
    found, stack = [], [*root.children.values()]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found
