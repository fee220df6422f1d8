"""`rollout submit`: runs a configuration or a script as a job of a Ray cluster, and stays with it until it is over."""

import argparse
import asyncio
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import filesize

import rollout
from rollout.cli.interrupt import Interrupt
from rollout.cli.submit_package import FILE_BYTES, make_package

if TYPE_CHECKING:
    from rollout.cluster.submission import JobEnd

FAILED = 1
RAY_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""They report uploads and connections, each with a level of its own."""

USAGE = "rollout submit [-h] [--address URL] [--submission-id ID] [--no-wait] CONFIG|SCRIPT [-- ARG …]"

DESCRIPTION = f"""
Runs TARGET as a Ray job: a configuration by `rollout run`, a script by `python`, with the arguments after `--`. Its log
comes here, and its exit code is this command's. Ctrl-C stops the job; a second one does not wait until it has.

Uploaded are: the script and the modules that it imports from its own directory; rollout itself, if it is run from a
checkout; and files of up to {filesize.decimal(FILE_BYTES)} below the current directory that are named by the job's
arguments, under `path` in an uploaded YAML file, or in an uploaded script. Directories and larger files that are named
must be readable on the nodes at the same absolute path. What `--out`, `--json` or a field `out` names is written at the
same absolute path on the node of the job. A word without `/` or `.` is not taken for a path: write ./models.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = subparsers.add_parser(
        "submit", help="run a configuration or a script as a job of a Ray cluster", description=DESCRIPTION, usage=USAGE
    )
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="CONFIG|SCRIPT", help="a YAML or a Python file")
    own = type(command)(prog=command.prog, description=DESCRIPTION, usage=USAGE)
    own.add_argument("target", type=Path, metavar="CONFIG|SCRIPT", help="a YAML or a Python file")
    for parser in (command, own):  # options may stand on either side of the target
        parser.add_argument(
            "--address",
            metavar="URL",
            help="of the cluster's dashboard (default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, http://127.0.0.1:8265)",
        )
        parser.add_argument("--submission-id", metavar="ID", help="what the job is called (default: made up)")
        parser.add_argument("--no-wait", action="store_true", help="return once the job is submitted")
    command.set_defaults(func=_submit, own=own)


def _submit(args: argparse.Namespace) -> int:
    words, arguments = _split(args.words)
    args.own.parse_args(words, namespace=args)
    package = make_package(args.target, arguments, here=Path.cwd(), checkout=_checkout())
    archive = package.archive()
    for path in package.read_in_place:
        _say(f"not uploaded, read on the nodes: {path}")
    for path in package.outputs:
        _say(f"written on the job's node: {path}")
    _use_token()
    with Interrupt() as interrupt:
        from rollout.cluster.submission import JobServer  # Ray

        for logger in RAY_LOGGERS:
            logging.getLogger(logger).setLevel(logging.WARNING)
        server = JobServer(args.address)
        with interrupt.deferred():
            job = server.submit(package.entrypoint, archive, args.submission_id or f"rollout-{secrets.token_hex(6)}")
            size = f"{filesize.decimal(len(archive))} in {len(package.files)} files"
            _say(f"job {job.job_id} at {server.address}: {package.entrypoint} ({size})")
            _say(f"uploaded: {', '.join(package.named_files)}")
            if args.no_wait and not interrupt.requested:
                return 0
            end = asyncio.run(
                job.follow(_write, stop=lambda: interrupt.requested, stopping=lambda: _say(_stopping(job.job_id)))
            )
        return _exit_code(end, job.job_id, interrupted=interrupt.requested)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The target and our options after it, and the arguments of the job, after `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _checkout() -> Path | None:
    """The directory of the package if it is not an installed one, which clusters have, too."""
    directory = Path(rollout.__file__).parent
    return None if {"site-packages", "dist-packages"} & set(directory.parts) else directory


def _use_token() -> None:
    """Have Ray, which is not imported yet, send the token if there is one; its clients do not unless they are told."""
    there = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if there or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _stopping(job_id: str) -> str:
    return f"stopping the job {job_id}; Ctrl-C again does not wait for that, and `ray job stop {job_id}` repeats it"


def _exit_code(end: "JobEnd", job_id: str, *, interrupted: bool) -> int:
    if end.end == "SUCCEEDED":
        return 0
    if end.end == "STOPPED" and interrupted:
        raise KeyboardInterrupt
    if end.end == "STOPPED":
        _say(f"error: the job {job_id} was stopped")
        return FAILED
    _say(f"error: the job {job_id} failed: {end.reason}")
    code = end.exit_code or FAILED
    return code if code > 0 else 128 - code


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(line: str) -> None:
    sys.stderr.write(f"rollout: {line}\n")
