"""Calls to actors from a driver: deadlines, and our own errors instead of Ray's."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rollout.errors import DeadlineError, RolloutError, ServiceClosedError, WorkerLostError


async def call(method: Any, *args: Any, timeout_s: float) -> Any:
    """Call a method of the controller and wait for the answer.

    Raises what the method raised if it is one of our errors, `ServiceClosedError` if the actor is gone,
    `DeadlineError` at the timeout.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await method.remote(*args)
    except RayTaskError as error:
        raise _typed(error) from None
    except RayActorError:
        raise ServiceClosedError("the service was closed, or its controller died") from None
    except TimeoutError:
        raise DeadlineError(f"the service did not answer within {timeout_s:g} s") from None


def wait_for(refs: Sequence[Any], timeout_s: float, what: str) -> Any:
    """The answers of actors that are being started.

    Raises what they raised if it is one of our errors, `WorkerLostError` if one died, `DeadlineError` at the
    timeout.
    """
    try:
        return ray.get(list(refs), timeout=timeout_s)
    except RayTaskError as error:
        raise _typed(error) from None
    except RayActorError as error:
        raise WorkerLostError(f"{what}: a process died while it was started: {one_line(error)}") from None
    except GetTimeoutError:
        raise DeadlineError(f"{what} were not up within {timeout_s:g} s") from None


def is_lost(error: BaseException) -> bool:
    """Whether it says that a worker process is gone, or was restarted since."""
    return isinstance(error, RayActorError | WorkerLostError)


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__


def _typed(error: RayTaskError) -> Exception:
    """Our own error, if that is what a remote call raised."""
    cause = error.cause
    return cause if isinstance(cause, RolloutError) else error
