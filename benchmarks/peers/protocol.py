"""What a peer and the benchmark say to each other: JSON objects, one a line.

The peer is started with one argument, a JSON object of options. Its first line is `{"ready": {...}}` with its
versions and settings, or `{"unavailable": "why"}`, after which it ends. Then it answers every request, a line with
`"do"` and whatever else that takes, with one line: a result, or `{"failed": "why"}`. It ends when its input does.

`generate` takes `prompts` (lists of token ids) and `new_tokens`, and answers `seconds`, from handing them over until
the last result is there, `output_ids`, and `logprobs`, how many log-probabilities of sampled tokens each output has.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's setting: its allocator asks the kernel for huge pages."""

Action = Callable[[dict[str, Any]], dict[str, Any]]
Prepared = tuple[dict[str, Any], Mapping[str, Action]]
"""What the peer is, and what it does for each word of `do`."""


def serve(prepare: Callable[[dict[str, Any]], Prepared]) -> None:
    """Prepare with the options of the command line, then answer requests until there are no more."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print must not get between the answers

    def answer(what: dict[str, Any]) -> None:
        channel.write(json.dumps(what) + "\n")
        channel.flush()

    options = json.loads(sys.argv[1])
    os.sched_setaffinity(0, options["cores"])
    try:
        described, actions = prepare(options)
    except Exception as error:
        answer({"unavailable": _told(error)})
        return
    python, huge_pages = sys.version.split()[0], os.environ.get(HUGE_PAGES) == "1"
    answer({"ready": described | {"python": python, "cores": options["cores"], "huge_pages": huge_pages}})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(actions[request.pop("do")](request))
        except Exception as error:
            answer({"failed": _told(error)})


def versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}


def _told(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
