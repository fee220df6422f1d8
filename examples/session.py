"""What a training run consists of around its loop: the command line, checkpoints, metrics, how it ends.

The algorithm is elsewhere: `main` is given a trainer, and a run whose `step` makes one turn of the loop.
"""

import argparse
import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from rich.progress import Progress

import rollout
from rollout.config import Config, Section, load_file
from rollout.durable import sync
from rollout.errors import ConfigError
from rollout.model.spec import read_spec
from rollout.training.recorder import Recorder

CONFIGS = Path(__file__).parent.parent / "configs"


class SessionSettings(Section):
    """What every run needs."""

    rollout: Config
    """Of the service, with whose model the trainer begins."""
    steps: PositiveInt = 45
    checkpoint_every: PositiveInt = 15
    """Steps."""
    out: Path
    """Metrics, curves, trajectories, the checkpoint, and the model at the end."""


def train(
    settings: Any,
    *,
    trainer: type[Any],
    run: type[Any],
    resume: bool = False,
    overwrite: bool = False,
) -> bool:
    """Train from the first step, or from the checkpoint, to the last one; False if Ctrl-C or SIGTERM ended it."""
    checkpoint = settings.out / "checkpoint.pt"
    if resume and not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: there is no checkpoint to go on from; --resume is for a run that wrote one")
    if not (resume or overwrite) and (settings.out / "metrics.jsonl").exists():
        raise ConfigError(f"{settings.out}: holds a run; --resume goes on with it, --overwrite begins again")
    state = torch.load(checkpoint, weights_only=True, mmap=True) if resume else None
    first = state["step"] if state else 0
    if first >= settings.steps:
        raise ConfigError(f"{checkpoint}: has {first} steps already; --steps asks for {settings.steps}")
    read_spec(settings.rollout.model.path)
    print(f"steps {first} to {settings.steps}, into {settings.out}; the service starts", flush=True)
    learner = trainer(settings)
    done = first
    with rollout.start(settings.rollout) as service, asked_to_stop() as stop:  # Ray has a handler of its own
        loop = run(settings, service, learner)
        if state is not None:
            loop.load_state_dict(state["run"], live=first)
        with Recorder(settings.out, first_step=first) as recorder, Progress() as progress:
            if state is None:
                checkpoint.unlink(missing_ok=True)
                shutil.rmtree(settings.out / "model", ignore_errors=True)
            (settings.out / "settings.json").write_text(settings.model_dump_json(indent=2))
            loop.store.discard(from_version=first)  # what was done after the checkpoint is done again
            recorder.plot()  # or it is refused before anything was trained
            for step in progress.track(range(first, settings.steps), description="training"):
                metrics = loop.step(step)
                recorder.log(step, metrics)
                progress.console.print(recorder.summary(step, metrics), soft_wrap=True)
                done, stopped = step + 1, stop()
                if stopped or done == settings.steps or done % settings.checkpoint_every == 0:
                    save({"step": done, "run": loop.state_dict()}, checkpoint)
                    recorder.plot()
                if stopped:
                    break
    export(learner.model, settings)
    return done == settings.steps


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def export(model: Any, settings: SessionSettings) -> None:
    """Write the model, with its tokenizer, as Hugging Face and `rollout run` read it."""
    model.save_pretrained(settings.out / "model")
    for pattern in ("tokenizer*", "special_tokens*", "chat_template*", "vocab*", "merges*"):
        for file in settings.rollout.model.path.glob(pattern):
            shutil.copy(file, settings.out / "model")
    for file in (settings.out / "model").iterdir():
        file.chmod(0o644)  # safetensors are written for their owner only


def main(
    kind: type[SessionSettings],
    config: Path,
    *,
    trainer: type[Any],
    run: type[Any],
    words: Sequence[str] | None = None,
) -> int:
    """Of the command line `words`, with `config` where it names none; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="The head of the file says what it does; its Settings, and those of session.py, what can be set."
    )
    parser.add_argument("--config", type=Path, default=config, help="YAML (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="at which it ends")
    parser.add_argument("--seed", type=int, help="of the prompts and of all draws")
    parser.add_argument("--partial", action="store_true", help="leave what is not finished to the next step")
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out; give the same options"
    )
    again.add_argument("--overwrite", action="store_true", help="begin again although --out holds a run")
    parser.add_argument("--out", type=Path, help="directory for everything that is written (default: as --config says)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", dest="overrides", help="change one setting"
    )
    args = parser.parse_args(words)
    chosen = {"steps": args.steps, "rollout.run.seed": args.seed, "out": args.out, "partial": args.partial or None}
    overrides = [f"{name}={json.dumps(value, default=str)}" for name, value in chosen.items() if value is not None]
    try:
        settings = load_file(kind, args.config, overrides + args.overrides)
        whole = train(settings, trainer=trainer, run=run, resume=args.resume, overwrite=args.overwrite)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"curves: {settings.out / 'curves.png'}, model: {settings.out / 'model'}")
    if not whole:
        print("stopped; --resume goes on from the checkpoint")
    return 0 if whole else 130


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C, or SIGTERM, was given: the run ends after its step, with a checkpoint. A second one ends it at
    once."""
    asked = threading.Event()

    def ask(number: int, _: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("stopping after this step, with a checkpoint; once more ends it at once, without", file=sys.stderr)

    before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
