"""`rollout check --kv`: recomputes the page and byte accounting of a live service from its structures.

Every worker's engine does so between two steps, every pool between two calls; nothing is stopped. Exit code 1
if a counter is wrong, or something does not answer.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich import filesize
from rich.console import Console
from rich.table import Table

from rollout.cli.output import check_writable, write_atomically
from rollout.errors import ConfigError
from rollout.metrics import EngineStats, KVCheck, PoolStats, TierStats

FILE_WIDTH = 200
"""Columns of output that is not for a terminal: as wide as the tables need."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = subparsers.add_parser("check", help="check a running service")
    command.add_argument("--kv", action="store_true", help="recompute the accounting of KV pages and pool bytes")
    command.add_argument("--name", default="rollout", help="of the service (default: rollout)")
    command.add_argument("--address", help="of its Ray cluster (default: the one running here)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    command.set_defaults(func=_check)


def _check(args: argparse.Namespace) -> int:
    if not args.kv:
        raise ConfigError("nothing to check; name --kv")
    if args.json is not None:
        check_writable(args.json)
    from rollout.client import connect  # Ray

    with connect(args.name, args.address) as service:
        checks = service.check_kv()
        stats = service.stats()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    if stats.workers:
        console.print(_tiers({worker.worker: worker.engine for worker in stats.workers}))
    if stats.pools:
        console.print(_pools(stats.pools))
    for check in checks:
        console.print(f"{check.part}: {'ok' if check.violation is None else check.violation}")
    if args.json is not None:
        found = {"checks": [asdict(check) for check in checks], "stats": asdict(stats)}
        write_atomically(args.json, json.dumps(found, indent=2) + "\n")
    return 0 if _sound(checks) else 1


def _sound(checks: tuple[KVCheck, ...]) -> bool:
    return all(check.violation is None for check in checks)


def _tiers(engines: dict[str, EngineStats]) -> Table:
    columns = [column for column in TierStats.__dataclass_fields__ if column != "total"]
    table = Table("worker", "tier", "page", "total", *columns, title="KV pages")
    for worker, engine in engines.items():
        for name, tier in (("device", engine.device), ("host", engine.host)):
            if tier.total:
                counts = [str(getattr(tier, column)) for column in ("total", *columns)]
                table.add_row(worker, name, filesize.decimal(engine.page_bytes), *counts)
    return table


def _pools(pools: tuple[PoolStats, ...]) -> Table:
    names = ("budget", "stored", "reserved", "still_read", "copied", "sent", "shared", "read_here", "read_elsewhere")
    table = Table("node", "images", "segments", *(name.replace("_", " ") for name in names), title="pools")
    for pool in pools:
        sizes = [filesize.decimal(getattr(pool, name)) for name in names]
        table.add_row(pool.node[:8], str(pool.images), str(pool.segments), *sizes)
    return table
