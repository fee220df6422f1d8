"""`rollout show`: prints trajectories of a Parquet file, or of a directory that a `TrajectoryStore` wrote.

What sampled a token is its colour. What models and drivers wrote is foreign: whatever is not printable is escaped.
"""

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rollout.errors import ConfigError
from rollout.types import Attempt, FinishReason, Resume, Trajectory, Version, VersionRun

if TYPE_CHECKING:
    from rollout.store import Stored
    from rollout.text import Tokenizer

PARTIAL = "partial"
"""How a trajectory that can still be resumed, and so has no finish reason, is asked for."""
COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
"""Of versions, in turn."""
APPENDED = "dim"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = subparsers.add_parser("show", help="print trajectories")
    command.add_argument("path", type=Path, metavar="PATH", help="Parquet file, or directory of version=N partitions")
    command.add_argument("--model", type=Path, metavar="DIR", help="whose tokenizer turns ids into text")
    command.add_argument("--prompt", action="store_true", help="print prompts, too")
    command.add_argument("--json", action="store_true", help="print one JSON object a line")
    command.add_argument("--id", metavar="GLOB", help="only trajectories of such ids, for example 'p7/*'")
    command.add_argument("--version", type=int, metavar="N", help="only appended under N, or with tokens sampled by it")
    reasons = [*map(str, FinishReason), PARTIAL]
    command.add_argument("--finish-reason", choices=reasons, metavar="R", help=f"only {', '.join(reasons)}")
    command.add_argument("--resumed", action="store_true", help="only those that were resumed")
    command.add_argument("--min-reward", type=float, metavar="X", help="only those with a reward of X or more")
    command.add_argument("--max-reward", type=float, metavar="X", help="only those with a reward of X or less")
    command.add_argument("--limit", type=int, default=20, metavar="N", help="at most N (default: 20); 0: all")
    command.set_defaults(func=_show)


def _show(args: argparse.Namespace) -> int:
    path: Path = args.path
    if args.limit < 0:
        raise ConfigError(f"--limit: got {args.limit}, allowed: 0 (all) or more")
    if path.is_dir() and not any(path.glob("version=*")):
        raise ConfigError(f"{path}: not a directory of trajectories: there is no version=N in it")
    tokenizer = None if args.model is None else _tokenizer(args.model)
    from rollout.store import scan  # Arrow

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _print((row for row in scan(path) if _matches(row, args)), args, tokenizer)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _tokenizer(model: Path) -> "Tokenizer":
    from rollout.text import Tokenizer, read_tokenizer_files

    return Tokenizer(read_tokenizer_files(model))


def _matches(row: "Stored", args: argparse.Namespace) -> bool:
    trajectory = row.trajectory
    reward = math.nan if row.reward is None else row.reward  # which no bound admits
    versions = {row.version, *(run.version for run in trajectory.versions)}
    return (
        (args.id is None or fnmatchcase(trajectory.trajectory_id, args.id))
        and (args.version is None or args.version in versions)
        and (args.finish_reason is None or args.finish_reason == (trajectory.finish_reason or PARTIAL))
        and (not args.resumed or len(trajectory.resumes) > 0)
        and (args.min_reward is None or reward >= args.min_reward)
        and (args.max_reward is None or reward <= args.max_reward)
    )


class _Console(Console):
    """Leaves a broken pipe to its caller."""

    def on_broken_pipe(self) -> None:
        raise


def _print(rows: "Iterator[Stored]", args: argparse.Namespace, tokenizer: "Tokenizer | None") -> None:
    console = _Console(highlight=False, soft_wrap=True)
    shown, more = 0, False
    for row in rows:
        if args.limit and shown == args.limit:
            more = True
            break  # all of a store may take minutes
        shown += 1
        if args.json:
            sys.stdout.write(json.dumps(_object(row, tokenizer)) + "\n")
        else:
            for line in _lines(row, tokenizer, prompt=args.prompt):
                console.print(line)
    notes = sys.stderr if args.json else sys.stdout
    if more:
        notes.write("more match; --limit 0 shows all\n")
    if not shown:
        notes.write("nothing matches\n")


def _object(row: "Stored", tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """The columns of the file, with metadata as an object; numbers that JSON does not have are null."""
    from rollout.store import to_row

    trajectory = row.trajectory
    columns = {"version": row.version, **to_row(trajectory, row.reward), "metadata": trajectory.metadata}
    for name, ids in (("prompt_text", trajectory.prompt_ids), ("output_text", trajectory.output_ids)):
        if tokenizer is not None:
            columns[name] = _decode(tokenizer, ids) if _knows(tokenizer, ids) else None
    return {name: _finite(value) for name, value in columns.items()}


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def _lines(row: "Stored", tokenizer: "Tokenizer | None", *, prompt: bool) -> Iterator[Text]:
    trajectory = row.trajectory
    yield _head(row)
    yield Text("  ").append_text(_runs(trajectory.versions))
    for resume in trajectory.resumes:
        yield _resume(resume)
    for attempt in trajectory.attempts:
        yield _attempt(attempt)
    if trajectory.error is not None:
        yield Text(f"  error: {_escape(trajectory.error)}", style="red")
    if prompt:
        ids = trajectory.prompt_ids
        text = Text(_escape(_decode(tokenizer if _knows(tokenizer, ids) else None, ids), keep="\n\t"))
        yield from (Text("  > ").append_text(line) for line in text.split("\n", allow_blank=True))
    text = Text()
    for piece, version in _pieces(trajectory, tokenizer):
        text.append(_escape(piece, keep="\n\t"), style=_colour(version))
    yield from (Text("  │ ").append_text(line) for line in text.split("\n", allow_blank=True))


def _head(row: "Stored") -> Text:
    trajectory = row.trajectory
    facts = [trajectory.finish_reason or PARTIAL]
    if trajectory.abort_reason is not None:
        facts[0] += f" ({trajectory.abort_reason})"
    if row.reward is not None:
        facts.append(f"reward {row.reward:g}")
    if row.version is not None:
        facts.append(f"version {row.version}")
    facts.append(f"{len(trajectory.prompt_ids)} + {len(trajectory.output_ids)} tokens")
    facts.append(f"on {' '.join(map(_escape, trajectory.workers))}" if trajectory.workers else "on no worker")
    return Text(_escape(trajectory.trajectory_id), style="bold").append(f": {', '.join(facts)}", style="not bold")


def _runs(runs: Sequence[VersionRun]) -> Text:
    if not runs:
        return Text("no output")
    names = (("appended" if run.version is None else f"by version {run.version}", run) for run in runs)
    return Text(", ").join(Text(f"{run.tokens} {name}", style=_colour(run.version)) for name, run in names)


def _resume(resume: Resume) -> Text:
    counts = ", ".join(f"{getattr(resume, f'{what}_tokens')} {what}" for what in ("cached", "loaded", "restored"))
    line = f"  resumed on {_escape(resume.worker)}: {counts}, {resume.recomputed_tokens} recomputed"
    return Text(line, style="yellow" if resume.recomputed_tokens else "cyan")


def _attempt(attempt: Attempt) -> Text:
    why = attempt.reason or _escape(attempt.error or "failed")
    return Text(f"  begun again after {len(attempt.output_ids)} tokens: {why}", style="yellow")


def _colour(version: Version | None) -> str:
    return APPENDED if version is None else COLOURS[version % len(COLOURS)]


def _pieces(trajectory: Trajectory, tokenizer: "Tokenizer | None") -> Iterator[tuple[str, Version | None]]:
    """The output's text, cut where the version changes; a character of two versions' bytes goes to the later one."""
    ids = trajectory.output_ids
    tokenizer = tokenizer if _knows(tokenizer, ids) else None
    whole = _decode(tokenizer, ids)
    tokens = begin = 0
    for run in trajectory.versions:
        tokens += run.tokens
        end = len(whole)
        if tokens < len(ids):
            end = max(begin, min(end, len(_decode(tokenizer, ids[:tokens]).rstrip("\ufffd"))))
        yield whole[begin:end], run.version
        begin = end


def _knows(tokenizer: "Tokenizer | None", ids: Sequence[int]) -> bool:
    return tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids)


def _decode(tokenizer: "Tokenizer | None", ids: Sequence[int]) -> str:
    """Their text; without a tokenizer, the ids."""
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)


def _escape(text: str, keep: str = "") -> str:
    """What is not printable, such as what a terminal would obey, as an escape."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )
