"""One execution of `rollout run`: a service, the file it fills, the report, and the replay that verifies it."""

import asyncio
import dataclasses
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rollout.cli.driver import Driver, Outcome, Write
from rollout.cli.interrupt import Interrupt
from rollout.cli.progress import Progress
from rollout.cli.prompts import PromptRow
from rollout.cli.report import Report, make_report, make_table
from rollout.cli.verify import compare_all, replays, resumed, uninterrupted
from rollout.client import Rollout, start
from rollout.config import Config
from rollout.errors import DeadlineError, InvalidPromptError, ServiceError
from rollout.store import TrajectoryWriter, read_trajectories
from rollout.types import Trajectory


class Execution:
    """Rolls out once."""

    def __init__(
        self, config: Config, rows: Sequence[PromptRow], interrupt: Interrupt, *, command: str, json_path: Path | None
    ) -> None:
        self._config = config
        self._rows = rows
        self._interrupt = interrupt
        self._command = command
        self._json_path = json_path
        self._console = Console(stderr=True)
        # Whoever runs this did not set up the cluster's authentication and need not be told about it.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)

    def run(self, *, verify: bool) -> int:
        """Returns the exit code.

        Raises `DeadlineError` if the run stalled and `ServiceError` if trajectories failed, with everything
        written; before that, whatever starting a service raises.
        """
        outcome, report = self._roll_out()
        self._write(report)
        Console().print(make_table(report))
        sys.stdout.write(f"{self._config.run.out}: {outcome.trajectories + outcome.rejected} rows\n")
        if outcome.stalled is not None:
            self._console.print(outcome.stalled.state, markup=False, highlight=False, soft_wrap=True)
            raise DeadlineError(outcome.stalled.args[0])
        if self._interrupt.requested:
            raise KeyboardInterrupt
        if self._rows and outcome.rejected == len(self._rows):
            raise InvalidPromptError(f"all {outcome.rejected} prompts were rejected; {self._config.run.out} says why")
        if outcome.failures:
            raise ServiceError(
                f"{len(outcome.failures)} of {outcome.trajectories} trajectories failed; {outcome.failures[0]}"
            )
        return self._verify(report) if verify else 0

    def _roll_out(self) -> tuple[Outcome, Report]:
        config = self._config
        began = time.monotonic()
        with TrajectoryWriter(config.run.out) as writer, start(config) as service:
            start_s = time.monotonic() - began
            outcome = self._drive(service, self._rows, writer.write, title="roll out")
            writer.close()  # before the service ends, which may take a while
        return outcome, make_report(outcome, command=self._command, config=config, start_s=start_s)

    def _verify(self, report: Report) -> int:
        """Replay what was resumed, on a second service; the exit code is 1 if anything differs."""
        if not self._config.engine.deterministic:
            self._console.print("verify: equality is promised with engine.deterministic=true only")
        originals = resumed(read_trajectories(self._config.run.out))
        replayed: list[Trajectory] = []
        if originals:
            with start(uninterrupted(self._config)) as service:
                outcome = self._drive(service, replays(originals.values()), replayed.extend, title="verify")
            if self._interrupt.requested:
                raise KeyboardInterrupt
            if outcome.stalled is not None:
                raise DeadlineError(f"the replay: {outcome.stalled.args[0]}")
        mismatches = compare_all(originals, replayed)
        self._write(
            dataclasses.replace(
                report,
                verified_trajectories=len(originals),
                mismatched_trajectories=len(mismatches),
                mismatches=mismatches,
            )
        )
        sys.stdout.write(f"verified: {len(originals)} resumed trajectories, {len(mismatches)} differ\n")
        for mismatch in mismatches:
            at = "" if mismatch.index is None else f" from token {mismatch.index} on"
            sys.stdout.write(f"{mismatch.trajectory_id}: {mismatch.kind} differ{at}\n")
        return 1 if mismatches else 0

    def _drive(self, service: Rollout, rows: Sequence[PromptRow], write: Write, *, title: str) -> Outcome:
        run = self._config.run
        with self._interrupt.deferred(), Progress(self._console, title=title, total=len(rows)) as progress:
            driver = Driver(
                service.aio,
                samples=run.samples,
                write=write,
                progress=progress,
                interrupted=lambda: self._interrupt.requested,
            )
            return asyncio.run(driver.run(rows))

    def _write(self, report: Report) -> None:
        if self._json_path is not None:
            self._json_path.write_text(report.as_json())
