"""Progress on a terminal and in a log."""

import io

from rich.console import Console

from rollout.cli.progress import Progress
from rollout.metrics import RolloutCounters, ServiceStats
from rollout.types import Phase
from tests.weights import WEIGHTS

STATS = ServiceStats(
    weights=WEIGHTS,
    phases={Phase.DECODING: 3, Phase.RESTORING: 1, Phase.QUEUED: 4, Phase.SUSPENDING: 1, Phase.FINISHED: 9},
    counters=RolloutCounters(tokens=120, suspensions=7),
)


def test_a_log_gets_plain_lines_at_a_low_rate() -> None:
    now = [100.0]
    log = io.StringIO()
    with Progress(Console(file=log), title="roll out", total=16, clock=lambda: now[0]) as progress:
        for _ in range(100):
            progress.update(STATS, 5)
            now[0] += 0.5
    assert (
        log.getvalue().splitlines()
        == ["roll out: 5/16 groups, 120 tokens, 0.0 tokens/s, 4 running, 5 waiting, 7 suspensions"] * 5
    )


def test_nothing_is_logged_before_the_first_token() -> None:
    log = io.StringIO()
    with Progress(Console(file=log), title="roll out", total=16) as progress:
        progress.update(ServiceStats(weights=WEIGHTS, phases={}, counters=RolloutCounters()), 0)
    assert log.getvalue() == ""


def test_a_terminal_gets_a_bar_and_notes_above_it() -> None:
    screen = io.StringIO()
    with Progress(Console(file=screen, force_terminal=True, width=80), title="roll out", total=16) as progress:
        progress.update(STATS, 5)
        progress.note("rejected prompt [b]7[/b]: ünfit")
    text = screen.getvalue()
    assert "5/16" in text
    assert "groups, 120 tokens, " in text
    assert "/s, 7 suspensions" in text
    assert "rejected prompt [b]7[/b]: ünfit" in text
    assert "\x1b[?25h" in text, "the cursor stays hidden"


def test_the_rate_is_that_of_the_last_updates() -> None:
    now = [0.0]
    log = io.StringIO()
    with Progress(Console(file=log), title="run", total=1, clock=lambda: now[0]) as progress:
        for tokens in range(0, 4000, 100):
            now[0] += 2.0
            progress.update(ServiceStats(weights=WEIGHTS, phases={}, counters=RolloutCounters(tokens=tokens)), 0)
    assert "3600 tokens, 50.0 tokens/s" in log.getvalue().splitlines()[-1]
