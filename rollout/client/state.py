"""What a driver writes into its checkpoint of a service's trajectories: plain values, and back."""

import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rollout.control.saved import Saved
from rollout.errors import InvalidArgumentError, InvalidSamplingError

FORMAT = 1
"""Raised when the meaning of what is there changes."""

NUMBERED = re.compile(r"auto-(?:.*-)?(\d+)")
"""A submission without a key, of any client."""

# In a tuple, since a dataclass by itself takes no configuration from here, and parts of others do.
_SAVED = TypeAdapter(tuple[Saved], config=ConfigDict(ser_json_inf_nan="constants", ser_json_bytes="base64"))


def to_state(saved: Saved, *, next_key: int) -> dict[str, Any]:
    """Of dicts, lists, strings and numbers only, so that any format can hold it; of metadata, what is nothing of these
    becomes its str(), and bytes become base64."""
    values: dict[str, Any]
    # Without warnings of metadata whose keys are not strings: they become strings.
    (values,) = _SAVED.dump_python((saved,), mode="json", fallback=_plain, warnings=False)
    return {"format": FORMAT, "next_key": next_key, **values}


def from_state(state: Mapping[str, Any]) -> tuple[Saved, int]:
    """What was saved, and the number of the next submission without a key. Raises `InvalidArgumentError`."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        got = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        raise InvalidArgumentError(f"state: got format {got!r:.80}, allowed: {FORMAT}, as state_dict makes it")
    values = dict(state)
    del values["format"]
    next_key = values.pop("next_key", None)
    if not isinstance(next_key, int) or isinstance(next_key, bool):
        raise InvalidArgumentError(f"state: next_key: got {next_key!r:.80}, allowed: an integer")
    try:
        (saved,) = _SAVED.validate_python((values,))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        raise InvalidArgumentError(f"state: {place or 'all of it'}: {first['msg']}") from None
    except InvalidSamplingError as error:
        raise InvalidArgumentError(f"state: groups: submission.sampling: {error}") from None
    names = (NUMBERED.fullmatch(group.submission.group_id) for group in saved.groups)
    # Another client may have named what is there than the one that counted.
    return saved, max([next_key, *(int(name[1]) + 1 for name in names if name)])


def _plain(value: object) -> int | float | str:
    """Of what a library made: its numbers are no `int` and no `float`."""
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else str(value)
