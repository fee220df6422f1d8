"""What a driver submits: a prompt and how its samples are to be rolled out."""

from dataclasses import dataclass, field
from typing import Any

from rollout.types import GroupId, Priority, SamplingParams, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A group to roll out."""

    group_id: GroupId
    prompt_ids: tuple[int, ...]
    sampling: tuple[SamplingParams, ...]
    """One for each sample."""
    seeds: tuple[int, ...]
    """Likewise."""
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)
    """Not looked at: of two submissions that are otherwise equal, the first one's counts."""
    priority: Priority = Priority.TRAIN
    deadline_s: float | None = None
    """After which it is stopped; None: what the policy says, if there is one."""
    max_group_tokens: int | None = None
    """Sampled by all members together, over all their attempts; None: any number."""
    multi_turn: bool = False
    """A stop ends a turn: the trajectory then waits for `extend`."""
    caller: str = ""
    """Whose waits between turns are alike."""
    partial: bool = False
    """Members are handed out as they end."""
    min_version: Version | None = None
    """Nothing is sampled with weights of an older version."""
    exact_version: Version | None = None
    """Nothing is sampled with weights of another version."""

    def __post_init__(self) -> None:
        assert len(self.sampling) == len(self.seeds), (len(self.sampling), len(self.seeds))

    def admits(self, version: Version) -> bool:
        """Whether weights of this version may sample for it."""
        if self.exact_version is not None:
            return version == self.exact_version
        return self.min_version is None or version >= self.min_version

    @property
    def wants(self) -> str:
        """The version that it asks for, in words."""
        return (
            f"exact_version {self.exact_version}"
            if self.exact_version is not None
            else f"min_version {self.min_version}"
        )
