"""The half of the controller that decides where the KV of stopped trajectories goes, and gets it there.

    parked on its worker → exported to a pool | kept there, on the device or the host | given up
    kept → recalled → any of these          pooled → started for its KV only → kept

Whatever leaves a worker parked is released exactly once, or kept there and then released or used. A move that
fails leaves the KV where it was; what an abort says comes then happens in any case.
"""

from collections.abc import Sequence
from dataclasses import replace

from rollout.control.commands import Command, Export, KeepThere, Recall, Release
from rollout.control.intent import WORKER_TIERS, Home, Intent, Transfer
from rollout.control.messages import Displaced, Exported, ExportFailed, Moved, Parked, Recalled
from rollout.control.pooled import Pooled
from rollout.control.records import Record
from rollout.control.roster import Roster
from rollout.control.routing import move_cost_s, recompute_s
from rollout.types import AbortReason, FinishReason, Keep, KVRun, Phase, Then, TrajectoryId, WorkerId, first_tokens


class Suspensions:
    """What aborts, slices and pools lead to."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    # Aborts and slices --------------------------------------------------------------------------------

    def parked(self, record: Record, event: Parked, now: float) -> list[Command]:
        """A trajectory left the batch, with its KV pinned on its worker."""
        worker = self._roster.fleet.leave(record)
        record.kv_tokens = max(record.kv_tokens, event.kv_tokens)
        if event.reason is AbortReason.TURN:  # and not if it was only brought to a worker while it waits
            record.ended_turn = True
        if record.intent is None or (record.ended_turn and record.intent.then is Then.REQUEUE):
            reason = event.reason or AbortReason.SLICE_BUDGET
            if reason is AbortReason.SLICE_BUDGET and record.allowance_spent:
                reason = AbortReason.BUDGET
            record.intent = self._roster.policies.intent(reason)
            record.fired.add(reason)
        if not record.promoting:
            record.suspensions += 1
            self._roster.tally["suspensions"] += 1
            self._roster.stopped(record, record.intent, now)
        record.promoting = False
        record.enter(Phase.SUSPENDING)
        keep = self._roster.keeping.decide(record, record.intent, event.kv_tokens, worker, now)
        if keep is not record.intent.keep:
            record.intent = replace(record.intent, keep=keep)
        return self._put_away(record, event, worker.worker_id, now)

    def change(self, record: Record, intent: Intent, now: float) -> list[Command]:
        """Another abort of a trajectory that is off its worker, or leaving it. Where its KV is does as `auto`."""
        if intent.keep is Keep.AUTO:
            on_its_way = record.intent if record.phase is Phase.SUSPENDING else None
            intent = replace(intent, keep=on_its_way.keep if on_its_way is not None else record.kept)
        record.intent = intent
        if record.phase is Phase.SUSPENDING:
            return record.pooled.expect(record.turn)
        if record.phase is Phase.QUEUED:
            self._roster.fleet.dequeue(record)
            record.enter(Phase.SUSPENDED)
        return self.settle(record, now) if record.phase is Phase.SUSPENDED else []

    def resume(self, record: Record, now: float) -> list[Command]:
        """Queue a trajectory that is suspended, or have it queued once it is; another one goes on as it does."""
        if record.phase is Phase.SUSPENDED:
            return self._roster.enqueue(record, now)
        if record.phase is Phase.QUEUED and record.intent is not None:
            self._roster.fleet.dequeue(record)  # it waited for its KV to be brought to a worker
            record.enter(Phase.SUSPENDED)
            record.intent = None
            return self._roster.enqueue(record, now)
        if record.intent is not None and record.intent.then is Then.HOLD:
            record.intent = replace(record.intent, then=Then.REQUEUE)
            self._roster.groups.unhold(record)
            return record.pooled.expect(record.turn)
        return []

    def settle(self, record: Record, now: float) -> list[Command]:
        """A stopped trajectory has its KV where its intent says, or is sent there; then it does what comes then."""
        intent = record.intent
        assert intent is not None, f"{record.trajectory_id}: nothing to settle"
        if record.phase is not Phase.SUSPENDED:
            record.enter(Phase.SUSPENDED)
        commands: list[Command] = []
        if intent.keep is Keep.NONE:
            commands = [*self._roster.leave_home(record), *record.pooled.replace(None)]
        elif intent.then is Then.HOLD and intent is not record.moved_for:
            record.moved_for = intent
            moves = self._move(record, intent.keep, now)
            if moves is not None:
                return moves
        record.intent = None
        record.abort_reason = intent.reason
        match intent.then:
            case Then.HOLD:
                self._roster.groups.hold(record)
                return commands + record.pooled.expect(record.turn)
            case Then.FINISH:
                # What ended a turn is whole: it stopped by itself.
                ended = FinishReason.STOP if record.ended_turn else FinishReason.ABORT
                return commands + self._roster.end(record, ended, now)
            case Then.REQUEUE:
                return commands + self._roster.enqueue(record, now)
            case Then.RETRY:
                commands += self.begin_again(record, intent.reason)
                return commands + self._roster.enqueue(record, now)
            case Then.DROP:
                return commands + self._roster.drop(record, intent.reason, now)

    def take_up(self, record: Record, then: Then, now: float) -> list[Command]:
        """A trajectory of another service, of which tokens are left, does what was to come then."""
        if then is Then.REQUEUE:
            return self._roster.enqueue(record, now)
        record.intent = Intent(keep=Keep.NONE, then=then, reason=record.abort_reason or AbortReason.DRIVER)
        return self.settle(record, now)

    def begin_again(self, record: Record, reason: AbortReason) -> list[Command]:
        """A suspended trajectory has nothing but its prompt again, and an attempt that ended for `reason`."""
        record.begin_again(reason=reason)
        return [*self._roster.leave_home(record), *record.pooled.replace(None)]

    def leave_home_for_pool(self, record: Record, now: float) -> list[Command]:
        """A trajectory, just taken out of the queue, is to start elsewhere than where its KV is: that goes to the pool
        first, or is given up where computing it again is cheaper, or the pool did not take it."""
        home = record.home
        assert home is not None, f"{record.trajectory_id} has no home to leave"
        there = self._roster.fleet.get(home.worker)
        experience = self._roster.keeping.experience
        refused = record.moved_from == home.worker
        if there is None or refused or recompute_s(record, there) <= move_cost_s(record, there, experience):
            return [*self._roster.leave_home(record), *self._roster.wait(record, now)]
        record.moved_from = home.worker
        record.enter(Phase.SUSPENDED)
        reason = record.abort_reason or AbortReason.SLICE_BUDGET
        return self.relocate(record, Intent(keep=Keep.POOL, then=Then.REQUEUE, reason=reason), now)

    def relocate(self, record: Record, intent: Intent, now: float) -> list[Command]:
        """KV of a suspended trajectory goes where `intent` says, whatever comes then."""
        record.intent = intent
        moves = self._move(record, intent.keep, now)
        return moves if moves is not None else self.settle(record, now)

    def lost(self, worker: WorkerId, now: float) -> list[Command]:
        """What was kept on a worker, or on its way there, is gone with it."""
        commands: list[Command] = []
        for record in self._roster.groups.records():
            if record.home is not None and record.home.worker == worker:
                self._roster.settle_at(record, None)
            transfer = record.transfer
            if transfer is None or transfer.worker != worker:
                continue
            if transfer.kind is Transfer.Kind.EXPORT:
                record.transfer = replace(transfer, back=None)  # the pool will answer
            else:
                record.transfer = None
                commands += self.settle(record, now)
        return commands

    # On a worker --------------------------------------------------------------------------------------

    def moved(self, event: Moved, worker: WorkerId, now: float) -> list[Command]:
        """The KV is where it is kept on its worker."""
        record = self._transferring(event.trajectory_id, event.epoch, Transfer.Kind.KEEP)
        if record is None:
            return []
        transfer, record.transfer = record.transfer, None
        assert transfer is not None
        if event.kv_tokens:
            home = Home(
                worker=worker,
                epoch=event.epoch,
                where=event.where,
                kv_tokens=event.kv_tokens,
                written=first_tokens(transfer.written, event.kv_tokens),
            )
            self._roster.settle_at(record, home)
        if event.error is not None:
            self._roster.tally["keep_failures"] += 1
            self._roster.troubles.append(f"{record.trajectory_id}: kept on the {event.where}: {event.error}")
        there = event.kv_tokens and event.error is None and transfer.back is None
        if there and event.where is Keep.HOST:
            self._roster.tally["written_bytes"] += event.kv_tokens * self._token_bytes(worker)
        commands: list[Command] = []
        if there:
            # An older image spares bytes the next time, and tokens if what is kept is evicted.
            base = record.pooled.agreeing(transfer.written)
            older = base is not None and base.kv_tokens < event.kv_tokens
            commands = record.pooled.replace(base if older else None)
        return [*commands, *self.outdated(record), *self.settle(record, now)]

    def recalled(self, event: Recalled, worker: WorkerId, now: float) -> list[Command]:
        """What is left of kept KV is pinned on its worker, to go elsewhere."""
        record = self._transferring(event.trajectory_id, event.epoch, Transfer.Kind.RECALL)
        if record is None:
            return []
        home = self._roster.settle_at(record, None)
        record.transfer = None
        there = self._roster.fleet.get(worker)
        if there is not None and home is not None and home.where is Keep.DEVICE:
            there.came_back(min(1.0, event.kv_tokens / home.kv_tokens), now)
        return self._put_away(record, event, worker, now, back=home.where if home is not None else None)

    def _put_away(
        self, record: Record, event: Parked, worker: WorkerId, now: float, *, back: Keep | None = None
    ) -> list[Command]:
        """KV that is pinned on a worker, where it was kept if `back` says so, goes where the intent says."""
        intent = record.intent
        assert intent is not None
        base = record.pooled.agreeing(event.written)
        useful = self._roster.versions.may_use(event.written)
        pooled_tokens = base.kv_tokens if base is not None else 0
        more = event.kv_tokens > pooled_tokens or (intent.keep in WORKER_TIERS and event.kv_tokens == pooled_tokens > 0)
        if not (useful and more and intent.keeps):
            release = Release(worker=worker, trajectory_id=event.trajectory_id, epoch=event.epoch)
            return [release, *self.settle(record, now)]
        if intent.keep in WORKER_TIERS:
            return self._keep_there(record, worker, event.epoch, event.written, intent.keep)
        node = self._roster.fleet.node_of(worker)
        record.pooled.export_to(node, record.turn)
        record.transfer = Transfer(
            kind=Transfer.Kind.EXPORT, worker=worker, epoch=event.epoch, written=event.written, back=back
        )
        return [
            Export(
                worker=worker,
                node=node,
                trajectory_id=record.trajectory_id,
                epoch=event.epoch,
                kv_tokens=event.kv_tokens,
                prompt_pages=event.prompt_pages,
                page_keys=event.page_keys,
                written=event.written,
                base=base,
                turn=record.turn,
                release=back is None,
            ),
            *record.pooled.expect(record.turn),
        ]

    def _keep_there(
        self,
        record: Record,
        worker: WorkerId,
        epoch: int,
        written: tuple[KVRun, ...],
        where: Keep,
        *,
        back: Keep | None = None,
    ) -> list[Command]:
        record.moved_for = record.intent
        record.transfer = Transfer(kind=Transfer.Kind.KEEP, worker=worker, epoch=epoch, written=written, back=back)
        return [
            KeepThere(worker=worker, trajectory_id=record.trajectory_id, epoch=epoch, where=where),
            *record.pooled.expect(record.turn),
        ]

    def _move(self, record: Record, keep: Keep, now: float) -> list[Command] | None:
        """Send KV that is suspended elsewhere to where `keep` says; None if it is there, or cannot be brought there."""
        home = record.home
        if home is not None and home.where is not keep:
            record.enter(Phase.SUSPENDING)
            record.transfer = Transfer(
                kind=Transfer.Kind.RECALL, worker=home.worker, epoch=home.epoch, written=home.written
            )
            recall = Recall(worker=home.worker, trajectory_id=record.trajectory_id, epoch=home.epoch)
            return [recall, *record.pooled.expect(record.turn)]
        if home is not None or keep not in WORKER_TIERS or record.pooled.image is None:
            return None
        if record.budget_spent or self._roster.fleet.hopeless is not None:
            return None
        return self._roster.wait(record, now)

    def _token_bytes(self, worker: WorkerId) -> int:
        there = self._roster.fleet.get(worker)
        return there.facts.token_bytes if there is not None and there.facts is not None else 0

    def _transferring(self, trajectory_id: TrajectoryId, epoch: int, kind: Transfer.Kind) -> Record | None:
        """The trajectory, if this is what is under way with its KV."""
        record = self._roster.groups.get(trajectory_id)
        transfer = record.transfer if record is not None else None
        return record if transfer is not None and (transfer.kind, transfer.epoch) == (kind, epoch) else None

    # In a pool ----------------------------------------------------------------------------------------

    def exported(self, event: Exported, now: float) -> list[Command]:
        record = self._transferring(event.trajectory_id, event.epoch, Transfer.Kind.EXPORT)
        if record is None:
            return self._exported_too_late(event)
        self._roster.tally["exported_bytes"] += event.sent_bytes
        self._roster.tally["written_bytes"] += event.sent_bytes
        if event.sent_bytes and event.seconds:
            self._roster.keeping.experience.exported(event.sent_bytes, event.seconds, now)
        commands = [*self._release(record), *record.pooled.stored(event.image), *self.outdated(record)]
        return commands + self.settle(record, now)

    def export_failed(self, event: ExportFailed, now: float) -> list[Command]:
        record = self._transferring(event.trajectory_id, event.epoch, Transfer.Kind.EXPORT)
        if record is None:
            return []
        self._roster.tally["export_failures"] += 1
        self._roster.troubles.append(f"{record.trajectory_id}: export: {event.error}")
        export, intent = record.transfer, record.intent
        assert export is not None
        assert intent is not None
        commands = record.pooled.replace(None) if export.displaced else []
        if export.back is None or not intent.keeps:
            return [*self._release(record), *commands, *self.settle(record, now)]
        if intent.keep in WORKER_TIERS:
            return commands + self._keep_there(record, export.worker, export.epoch, export.written, intent.keep)
        return commands + self._keep_there(
            record, export.worker, export.epoch, export.written, export.back, back=export.back
        )

    def displaced(self, displaced: Sequence[Displaced], by: TrajectoryId) -> list[Command]:
        """Images that made room for one that is needed sooner are gone: their trajectories recompute."""
        commands: list[Command] = []
        lost: list[TrajectoryId] = []
        for displacement in displaced:
            record = self._roster.groups.get(displacement.trajectory_id)
            if record is not None and record.pooled.displaced(displacement.segments):
                lost.append(record.trajectory_id)
                commands += self._lose_image(record)
        if lost:
            self._roster.tally["displaced_images"] += len(lost)
            self._roster.troubles.append(f"{by}: its image displaced {len(lost)} needed later: {', '.join(lost)}")
        return commands

    def outdated(self, record: Record) -> list[Command]:
        """Let go of KV that weights wrote with which nothing may be gone on any more."""
        versions, commands = self._roster.versions, list[Command]()
        recalled = record.transfer is not None and record.transfer.kind is Transfer.Kind.RECALL  # released when told
        if record.home is not None and not recalled and not versions.may_use(record.home.written):
            commands += self._roster.leave_home(record)
        if record.pooled.image is not None and not versions.may_use(record.pooled.image.written):
            commands += self._lose_image(record)
        return commands

    def forget_kv(self, record: Record) -> list[Command]:
        """Let go of all KV that is not in use, wherever it is."""
        return [*self._roster.leave_home(record), *self._lose_image(record)]

    def _lose_image(self, record: Record) -> list[Command]:
        """What a pool has of it is gone, or of no use."""
        if record.export is not None:  # which may have stored, on another node, what builds on the rest
            record.pooled.image = None
            record.transfer = replace(record.export, displaced=True)
            return []
        return record.pooled.replace(None)

    def _exported_too_late(self, event: Exported) -> list[Command]:
        """Nobody wants this image, or it was told before. A later export is told of with what that retains."""
        record = self._roster.groups.get(event.trajectory_id)
        if record is None:
            return Pooled(event.trajectory_id).let_go_of(event.image)
        if record.pooled.image == event.image or record.export is not None:
            record.pooled.may_be_at(event.image)
            return []
        return record.pooled.let_go_of(event.image)

    def _release(self, record: Record) -> list[Command]:
        """The export was answered: the worker's pages are not needed any more."""
        export, record.transfer = record.transfer, None
        assert export is not None
        return [Release(worker=export.worker, trajectory_id=record.trajectory_id, epoch=export.epoch)]
