"""Every error that a user of this package can meet, in one tree.

    RolloutError
    ├── ConfigError              a configuration, command line or environment that cannot work
    │   ├── ModelNotFoundError   no such model directory, or a file is missing from it
    │   ├── UnsupportedModelError  an architecture, dtype or file format that is not implemented
    │   ├── ClusterTooSmallError more CPUs or GPUs asked for than the cluster has
    │   └── NativeKernelsError   the CPU kernels cannot be compiled or loaded here
    ├── RequestError             one submission is wrong; others are not affected
    │   ├── InvalidPromptError   malformed prompt: wrong type, empty, unknown token ids
    │   ├── PromptTooLongError   prompt leaves no room for a single new token
    │   ├── InvalidSamplingError a sampling parameter outside its range
    │   ├── InvalidArgumentError another argument of a call outside what is allowed (also a ValueError)
    │   ├── DuplicateKeyError    a submit key that a live group has
    │   └── NotExtendableError   a trajectory to extend that is not suspended
    ├── KVError                  KV that cannot be stored or read; the caller recomputes
    │   ├── SegmentError
    │   │   ├── SegmentMissingError  the pool has no such segment (any more)
    │   │   └── SegmentDamagedError  bytes that do not match their checksum, size or fingerprint
    │   ├── PoolFullError        storing would exceed the byte budget
    │   ├── SupersededError      a later export of the same trajectory is stored
    │   └── CanaryError          a page, table row or segment that is not what its sequence wrote (`engine.canary`)
    ├── ServiceError             the running service cannot do what was asked
    │   ├── ServiceNotFoundError no service of that name in this cluster
    │   ├── ServiceClosedError   the service was closed
    │   ├── ServiceBusyError     more trajectories than `driver.max_outstanding`
    │   ├── StalledError         nothing went on for `driver.stall_timeout_s`; says what everything is doing
    │   ├── GroupFailedError     a group of which a member failed for good
    │   ├── UnknownWorkerError   no worker of that name, or the last one
    │   ├── UnsatisfiableVersionError  weights of a version that will not be live again
    │   └── WorkerLostError      no worker is left to run a trajectory
    ├── WeightsError             weights that cannot be published, sent or read; the old ones stay
    │   ├── WeightsChecksumError bytes of a tensor that do not match their checksum
    │   ├── WeightsSourceError   weights that cannot be read, or are not what they say
    │   │   └── WeightsGoneError  the live ones cannot be had any more: they must be updated again
    │   └── WeightsUpdateError   an update that workers refused; all keep the old weights
    └── DeadlineError            a wait ended at its deadline (also a TimeoutError)

A message says what was wrong, what was received and what is allowed.
"""

from typing import Any


class RolloutError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(RolloutError):
    """A configuration, command line or environment that cannot work."""


class ModelNotFoundError(ConfigError):
    """No such model directory, or a file that it must have is missing."""


class UnsupportedModelError(ConfigError):
    """An architecture, dtype or file format that is not implemented."""


class ClusterTooSmallError(ConfigError):
    """More CPUs or GPUs were asked for than the cluster has."""


class NativeKernelsError(ConfigError):
    """The CPU kernels cannot be compiled or loaded here."""


class RequestError(RolloutError):
    """One submission is wrong; others are not affected."""


class InvalidPromptError(RequestError):
    """A malformed prompt: wrong type, empty, or token ids outside the vocabulary."""


class PromptTooLongError(RequestError):
    """A prompt that leaves no room for a single new token."""


class InvalidSamplingError(RequestError):
    """A sampling parameter outside its range."""


class InvalidArgumentError(RequestError, ValueError):
    """An argument of a call outside what is allowed."""


class DuplicateKeyError(RequestError):
    """A submit key that a group which was not handed out yet has already."""


class NotExtendableError(RequestError):
    """A trajectory to extend that is not there, or neither suspended nor waiting."""


class KVError(RolloutError):
    """KV that cannot be stored or read; the caller falls back to recomputing."""


class SegmentError(KVError):
    """A segment that is of no use. `node` and `segment` name it where it is known which one."""

    def __init__(self, message: str, *, node: str | None = None, segment: str | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.segment = segment


class SegmentMissingError(SegmentError):
    """The pool has no such segment, or has it no more."""


class SegmentDamagedError(SegmentError):
    """Bytes that do not match their checksum, size or fingerprint."""


class PoolFullError(KVError):
    """Storing would exceed the pool's byte budget."""


class SupersededError(KVError):
    """An export that ended after a later one of the same trajectory: nothing of it is kept."""


class CanaryError(KVError):
    """KV that is not what its sequence wrote: `what` differs, first at `position`, in `slot` of `page`."""

    def __init__(
        self,
        message: str,
        *,
        what: str = "",
        sequence: tuple[str, int] | None = None,
        position: int | None = None,
        page: int | None = None,
        slot: int | None = None,
    ) -> None:
        super().__init__(message)
        self.what = what
        self.sequence = sequence
        self.position = position
        self.page = page
        self.slot = slot


class ServiceError(RolloutError):
    """The running service cannot do what was asked."""


class ServiceNotFoundError(ServiceError):
    """No service of that name runs in this cluster."""


class ServiceClosedError(ServiceError):
    """The service was closed."""


class ServiceBusyError(ServiceError):
    """More trajectories are under way than `driver.max_outstanding` allows."""


class StalledError(ServiceError):
    """Nothing went on for `driver.stall_timeout_s`; `state` is what everything was doing, as JSON."""

    def __init__(self, message: str, *, state: str = "") -> None:
        super().__init__(message, state)
        self.state = state

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.state}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _stalled, (self.args[0], self.state)


class GroupFailedError(ServiceError):
    """A group of which a member failed for good."""


class UnknownWorkerError(ServiceError):
    """No worker of that name, or the only one left."""


class UnsatisfiableVersionError(ServiceError):
    """Weights of a version that will not be live again were asked for."""


class WorkerLostError(ServiceError):
    """No worker is left to run a trajectory."""


class WeightsError(RolloutError):
    """Weights that cannot be published, sent or read."""


class WeightsChecksumError(WeightsError):
    """Bytes of `tensor` that do not match their checksum: they have `got`, not `expected`."""

    def __init__(self, message: str, *, tensor: str = "", got: int | None = None, expected: int | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.got = got
        self.expected = expected


class WeightsSourceError(WeightsError):
    """Weights that cannot be read, do not arrive, or are not what they say."""


class WeightsGoneError(WeightsSourceError):
    """The live weights cannot be had any more, as who sent them, or all who had them, are gone."""


class WeightsUpdateError(WeightsError):
    """An update of the weights that did not happen, and why for each worker."""


class DeadlineError(RolloutError, TimeoutError):
    """A wait ended at its deadline."""


def _stalled(message: str, state: str) -> StalledError:
    return StalledError(message, state=state)
