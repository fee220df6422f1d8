"""`rollout run`: rolls the prompts that a configuration names out into a Parquet file.

This module refuses what can be known to be wrong before Ray and torch are imported; `execution` does the rest.
"""

import argparse
from pathlib import Path

from rollout.cli.interrupt import Interrupt
from rollout.cli.output import check_writable
from rollout.config import Config, load_config
from rollout.errors import ConfigError
from rollout.model.spec import read_spec


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = subparsers.add_parser("run", help="roll out a file or data set of prompts into a Parquet file")
    command.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; configs/demo.yaml is an example")
    command.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", dest="overrides", help="change one field of CONFIG"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="where the trajectories go (default: run.out)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the counts and timings there")
    command.add_argument(
        "--verify",
        action="store_true",
        help="replay every resumed trajectory uninterrupted and compare; exact with engine.deterministic=true",
    )
    command.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    config = _config(args)
    if config.run.prompts is None:
        raise ConfigError(f"{args.config}: run.prompts: nothing to roll out; name a file or a data set")
    read_spec(config.model.path)
    inputs = [args.config] + ([config.run.prompts.path] if config.run.prompts.kind == "file" else [])
    outputs = [path for path in (config.run.out, args.json) if path is not None]
    for index, path in enumerate(outputs):
        check_writable(path)
        if path.resolve() in {other.resolve() for other in (*inputs, *outputs[:index])}:
            raise ConfigError(f"{path}: cannot be written: it is named as another file of this run, too")

    from rollout.cli.prompts import load_prompts  # Arrow

    rows = load_prompts(config.run.prompts)
    with Interrupt() as interrupt:
        from rollout.cli.execution import Execution  # Ray and torch

        execution = Execution(config, rows, interrupt, command=args.command, json_path=args.json)
        return execution.run(verify=args.verify)


def _config(args: argparse.Namespace) -> Config:
    config = load_config(args.config, args.overrides)
    if args.out is None:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"out": args.out})})
