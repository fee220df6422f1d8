"""What drivers import: `start` or `connect`, then submit prompts and take finished groups.

`AsyncRollout` is the client; `Rollout` is the same surface for drivers without an event loop.
"""

from rollout.client.asynchronous import ALL, AsyncRollout, Ids
from rollout.client.blocking import Rollout, connect, start

__all__ = ["ALL", "AsyncRollout", "Ids", "Rollout", "connect", "start"]
