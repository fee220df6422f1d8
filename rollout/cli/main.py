"""The command `rollout`: parses its line, runs one subcommand, and turns an error into one line and an exit code.

0: done. 1: it failed. 2: the command line, the configuration or the environment cannot work. 130: interrupted.
Ray, torch and Arrow are imported by the subcommands, after what can be checked without them.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from rollout.cli import bench, check, model, run, show, submit
from rollout.cli.interrupt import EXIT_CODE
from rollout.errors import ConfigError, RolloutError

FAILED = 1
REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(words)
        args.command = shlex.join(["rollout", *words])
        return int(args.func(args))
    except ConfigError as error:
        return _end(f"error: {error}", REFUSED)
    except (RolloutError, OSError) as error:
        return _end(f"error: {error}", FAILED)
    except KeyboardInterrupt:
        return _end("interrupted", EXIT_CODE)


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as everything else does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="rollout", description="Rollouts that suspend with all their KV and resume on another worker, exactly."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run.add_parser(commands)
    model.add_parser(commands)
    bench.add_parser(commands)
    check.add_parser(commands)
    show.add_parser(commands)
    submit.add_parser(commands)
    return parser


def _end(line: str, code: int) -> int:
    sys.stderr.write(f"rollout: {' '.join(line.split())}\n")
    return code
