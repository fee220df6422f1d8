"""What a run came to: the report that `--json` writes, and the table that ends the run.

Field names of the report are an interface; more may be added. A number that does not apply is null.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich import filesize
from rich.table import Table

from rollout.cli.driver import Ended, Outcome
from rollout.cli.verify import Mismatch
from rollout.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. Counts are of the whole run."""

    command: str
    config: dict[str, Any]
    ended: Ended
    start_s: float
    """Until the service was up."""
    wall_s: float
    """From the first submission until the last group was written."""
    groups: int
    trajectories: int
    failed_trajectories: int
    rejected_prompts: int
    generated_tokens: int
    tokens_per_s: float
    suspensions: int
    resumes: int
    resumed_elsewhere: int
    exported_bytes: int
    restored_bytes: int
    """By the workers that are left."""
    restored_tokens: int
    cached_tokens: int
    loaded_tokens: int
    """Copied from host memory of the worker."""
    recomputed_tokens: int
    written_bytes: int
    """KV of suspended trajectories, to the pool or a worker's host memory."""
    read_bytes: int
    """KV of resumed trajectories, from there."""
    useful_reload_ratio: float | None
    """Bytes read back for each byte written."""
    decisions: dict[str, dict[str, int]]
    """Where KV went, number, by what stopped the trajectory."""
    preemptions: int
    workers_lost: int
    restarts: int
    retries: int
    """Trajectories begun again, or gone on, after a failure (`groups.failed_member`)."""
    keep_failures: int
    displaced_images: int
    export_failures: int
    restore_failures: int
    exclusive_pages: int
    freed_pages: int
    exclusive_pages_freed_ratio: float | None
    """Pages freed by suspensions, of those that only the suspended trajectory used."""
    pages_freed_per_suspension: float | None
    verified_trajectories: int | None = None
    mismatched_trajectories: int | None = None
    mismatches: tuple[Mismatch, ...] | None = None

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def make_report(outcome: Outcome, *, command: str, config: Config, start_s: float) -> Report:
    counters = outcome.stats.counters
    return Report(
        command=command,
        config=config.model_dump(mode="json"),
        ended=outcome.ended,
        start_s=start_s,
        wall_s=outcome.wall_s,
        groups=outcome.groups,
        trajectories=outcome.trajectories,
        failed_trajectories=len(outcome.failures),
        rejected_prompts=outcome.rejected,
        generated_tokens=counters.tokens,
        tokens_per_s=counters.tokens / outcome.wall_s if outcome.wall_s else 0.0,
        suspensions=counters.suspensions,
        resumes=counters.resumes,
        resumed_elsewhere=counters.resumed_elsewhere,
        exported_bytes=counters.exported_bytes,
        restored_bytes=sum(worker.engine.restored_bytes for worker in outcome.stats.workers),
        restored_tokens=counters.restored_tokens,
        cached_tokens=counters.cached_tokens,
        loaded_tokens=counters.loaded_tokens,
        recomputed_tokens=counters.recomputed_tokens,
        written_bytes=counters.written_bytes,
        read_bytes=counters.read_bytes,
        useful_reload_ratio=outcome.stats.useful_reload_ratio,
        decisions={
            str(reason): {str(keep): count for keep, count in kept.items()}
            for reason, kept in outcome.stats.decisions.items()
        },
        preemptions=counters.preemptions,
        workers_lost=counters.workers_lost,
        restarts=counters.restarts,
        retries=counters.retries,
        keep_failures=counters.keep_failures,
        displaced_images=counters.displaced_images,
        export_failures=counters.export_failures,
        restore_failures=counters.restore_failures,
        exclusive_pages=counters.exclusive_pages,
        freed_pages=counters.freed_pages,
        exclusive_pages_freed_ratio=_ratio(counters.freed_pages, counters.exclusive_pages),
        pages_freed_per_suspension=_ratio(counters.freed_pages, counters.releases),
    )


def make_table(report: Report) -> Table:
    """The closing table; failures have a row only if there were any."""
    table = Table(title=f"{report.groups} groups, {report.trajectories} trajectories", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    freed, ratio = report.pages_freed_per_suspension, report.exclusive_pages_freed_ratio
    rows = {
        "tokens": f"{report.generated_tokens}",
        "tokens/s": f"{report.tokens_per_s:.1f}",
        "suspensions": f"{report.suspensions}",
        "resumes": f"{report.resumes}",
        "resumes on another worker": f"{report.resumed_elsewhere}",
        "exported": filesize.decimal(report.exported_bytes),
        "restored": filesize.decimal(report.restored_bytes),
        "tokens recomputed": f"{report.recomputed_tokens}",
        "pages freed per suspension": "–" if freed is None else f"{freed:.1f}",
        "exclusive pages freed": "–" if ratio is None else f"{ratio:.1%}",
    }
    for reason, kept in report.decisions.items():
        rows[f"KV after {reason}"] = ", ".join(f"{keep} {count}" for keep, count in kept.items())
    if report.useful_reload_ratio is not None:
        rows["read back of what was written"] = f"{report.useful_reload_ratio:.0%}"
    troubles = {
        "rejected prompts": report.rejected_prompts,
        "failed trajectories": report.failed_trajectories,
        "preemptions": report.preemptions,
        "workers lost": report.workers_lost,
        "restarts": report.restarts,
        "retries": report.retries,
        "not kept where told": report.keep_failures,
        "images displaced": report.displaced_images,
        "export failures": report.export_failures,
        "restore failures": report.restore_failures,
    }
    if report.loaded_tokens:
        rows["tokens loaded from host memory"] = f"{report.loaded_tokens}"
    rows |= {name: f"{count}" for name, count in troubles.items() if count}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
