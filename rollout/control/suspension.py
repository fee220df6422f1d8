"""The half of the controller that decides where the KV of stopped trajectories goes, and gets it there.

    parked on its worker → exported to a pool | kept there, on the device or the host | given up
    kept → recalled → any of these          pooled → started for its KV only → kept

Whatever leaves a worker parked is released exactly once, or kept there and then released or used. A move that
fails leaves the KV where it was; what an abort says comes then happens in any case.
"""

from collections.abc import Sequence

from rollout.control.messages import (
    Command,
    Displaced,
    Export,
    Exported,
    ExportFailed,
    KeepThere,
    Moved,
    Parked,
    Recall,
    Recalled,
    Release,
)
from rollout.control.pooled import Pooled
from rollout.control.records import Home, Intent, Record, Transfer
from rollout.control.roster import Roster
from rollout.types import FinishReason, Keep, Phase, Then, TrajectoryId, WorkerId

ON_WORKER = (Keep.DEVICE, Keep.HOST)


class Suspensions:
    """What aborts, slices and pools lead to."""

    def __init__(self, roster: Roster, *, keep: Keep) -> None:
        """`keep` is what `Keep.AUTO` means."""
        self._roster = roster
        self._keep = Keep.POOL if keep is Keep.AUTO else keep

    # Aborts and slices --------------------------------------------------------------------------------

    def intent(self, keep: Keep, then: Then) -> Intent:
        return Intent(keep=self._keep if keep is Keep.AUTO else keep, then=then)

    def parked(self, record: Record, event: Parked, now: float) -> list[Command]:
        """A trajectory left the batch, with its KV pinned on its worker."""
        worker = self._roster.fleet.leave(record)
        record.intent = record.intent or self.intent(Keep.AUTO, Then.REQUEUE)
        record.kv_tokens = max(record.kv_tokens, event.kv_tokens)
        if not record.promoting:
            record.suspensions += 1
            self._roster.tally["suspensions"] += 1
        record.promoting = False
        record.enter(Phase.SUSPENDING)
        return self._put_away(record, event, worker.worker_id, now)

    def change(self, record: Record, intent: Intent, now: float) -> list[Command]:
        """Another abort of a trajectory that is off its worker, or leaving it."""
        record.intent = intent
        if record.phase is Phase.SUSPENDING:
            return record.pooled.expect(record.turn)
        if record.phase is Phase.QUEUED:
            self._roster.fleet.dequeue(record)
            record.enter(Phase.SUSPENDED)
        return self.settle(record, now) if record.phase is Phase.SUSPENDED else []

    def settle(self, record: Record, now: float) -> list[Command]:
        """A stopped trajectory has its KV where its intent says, or is sent there; then it does what comes then."""
        intent = record.intent
        assert intent is not None, f"{record.trajectory_id}: nothing to settle"
        if record.phase is not Phase.SUSPENDED:
            record.enter(Phase.SUSPENDED)
        commands: list[Command] = []
        if intent.keep is Keep.NONE:
            commands = [*self._roster.leave_home(record), *record.pooled.replace(None)]
        elif intent.then is Then.HOLD and intent is not record.attempted:
            record.attempted = intent
            if moves := self._move(record, intent.keep, now):
                return moves
        record.intent = None
        match intent.then:
            case Then.HOLD:
                self._roster.groups.hold(record)
                return commands + record.pooled.expect(record.turn)
            case Then.FINISH:
                return commands + self._roster.end(record, FinishReason.ABORT, now)
            case Then.REQUEUE:
                return commands + self._roster.enqueue(record, now)

    def lost(self, worker: WorkerId, now: float) -> list[Command]:
        """What was kept on a worker, or on its way there, is gone with it."""
        commands: list[Command] = []
        for record in self._roster.groups.records():
            if record.home is not None and record.home.worker == worker:
                record.home = None
            transfer = record.transfer
            if transfer is not None and transfer.worker == worker and transfer.kind is not Transfer.Kind.EXPORT:
                record.transfer = None
                commands += self.settle(record, now)
        return commands

    # On a worker --------------------------------------------------------------------------------------

    def moved(self, event: Moved, worker: WorkerId, now: float) -> list[Command]:
        """The KV is where it is kept on its worker."""
        record = self._transferring(event.trajectory_id, event.epoch, Transfer.Kind.KEEP)
        if record is None:
            return []
        record.transfer = None
        if event.kv_tokens:
            record.home = Home(worker=worker, epoch=event.epoch, where=event.where, kv_tokens=event.kv_tokens)
        if event.error is not None:
            self._roster.tally["keep_failures"] += 1
            self._roster.troubles.append(f"{record.trajectory_id}: kept on the {event.where}: {event.error}")
            return self.settle(record, now)
        return [*record.pooled.replace(None), *self.settle(record, now)]

    def recalled(self, event: Recalled, worker: WorkerId, now: float) -> list[Command]:
        """What is left of kept KV is pinned on its worker, to go elsewhere."""
        record = self._transferring(event.trajectory_id, event.epoch, Transfer.Kind.RECALL)
        if record is None:
            return []
        record.transfer = record.home = None
        return self._put_away(record, event, worker, now)

    def _put_away(self, record: Record, event: Parked, worker: WorkerId, now: float) -> list[Command]:
        """KV that is pinned on a worker goes where the intent says."""
        intent = record.intent
        assert intent is not None
        record.attempted = intent
        release = Release(worker=worker, trajectory_id=event.trajectory_id, epoch=event.epoch)
        if not event.kv_tokens or intent.keep is Keep.NONE or intent.then is Then.FINISH:
            return [release, *self.settle(record, now)]
        if intent.keep in ON_WORKER:
            record.transfer = Transfer(kind=Transfer.Kind.KEEP, worker=worker, epoch=event.epoch)
            return [
                KeepThere(worker=worker, trajectory_id=event.trajectory_id, epoch=event.epoch, where=intent.keep),
                *record.pooled.expect(record.turn),
            ]
        if event.kv_tokens <= record.pooled.kv_tokens:
            return [release, *self.settle(record, now)]
        node = self._roster.fleet.node_of(worker)
        record.pooled.export_to(node, record.turn)
        record.transfer = Transfer(kind=Transfer.Kind.EXPORT, worker=worker, epoch=event.epoch)
        return [
            Export(
                worker=worker,
                node=node,
                trajectory_id=record.trajectory_id,
                epoch=event.epoch,
                kv_tokens=event.kv_tokens,
                prompt_pages=event.prompt_pages,
                page_keys=event.page_keys,
                base=record.pooled.image,
                turn=record.turn,
            ),
            *record.pooled.expect(record.turn),
        ]

    def _move(self, record: Record, keep: Keep, now: float) -> list[Command]:
        """Send KV that is suspended elsewhere to where `keep` says; nothing if it is there, or there is none."""
        home = record.home
        if home is not None and home.where is not keep:
            record.enter(Phase.SUSPENDING)
            record.transfer = Transfer(kind=Transfer.Kind.RECALL, worker=home.worker, epoch=home.epoch)
            return [Recall(worker=home.worker, trajectory_id=record.trajectory_id, epoch=home.epoch)]
        if home is None and keep in ON_WORKER and record.pooled.image is not None and not self._roster.fleet.hopeless:
            return self._roster.wait(record, now)
        return []

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
        return [*self._release(record), *record.pooled.stored(event.image), *self.settle(record, now)]

    def export_failed(self, event: ExportFailed, now: float) -> list[Command]:
        record = self._transferring(event.trajectory_id, event.epoch, Transfer.Kind.EXPORT)
        if record is None:
            return []
        self._roster.tally["export_failures"] += 1
        self._roster.troubles.append(f"{record.trajectory_id}: export: {event.error}")
        return [*self._release(record), *self.settle(record, now)]

    def displaced(self, displaced: Sequence[Displaced], by: TrajectoryId) -> list[Command]:
        """Images that made room for one that is needed sooner are gone: their trajectories recompute."""
        commands: list[Command] = []
        lost: list[TrajectoryId] = []
        for displacement in displaced:
            record = self._roster.groups.get(displacement.trajectory_id)
            if record is not None and record.pooled.displaced(displacement.segments):
                commands += record.pooled.replace(None)
                lost.append(record.trajectory_id)
        if lost:
            self._roster.tally["displaced_images"] += len(lost)
            self._roster.troubles.append(f"{by}: its image displaced {len(lost)} needed later: {', '.join(lost)}")
        return commands

    def _exported_too_late(self, event: Exported) -> list[Command]:
        """Nobody wants this image, or it was told before. A later export is told of with what that retains."""
        record = self._roster.groups.get(event.trajectory_id)
        if record is None:
            return Pooled(event.trajectory_id).let_go_of(event.image)
        if record.pooled.image == event.image or record.phase is Phase.SUSPENDING:
            record.pooled.may_be_at(event.image)
            return []
        return record.pooled.let_go_of(event.image)

    def _release(self, record: Record) -> list[Command]:
        """The export was answered: the worker's pages are not needed any more."""
        export, record.transfer = record.transfer, None
        assert export is not None
        return [Release(worker=export.worker, trajectory_id=record.trajectory_id, epoch=export.epoch)]
