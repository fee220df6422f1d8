"""`rollout model import`: a GGUF file made into a model directory that the engine reads."""

import argparse
import sys
from pathlib import Path

from rollout.model.gguf import import_gguf


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    model = subparsers.add_parser("model", help="prepare models")
    commands = model.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("import", help="convert a GGUF file to a Hugging Face directory in bfloat16")
    command.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the GGUF file (Llama only)")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory to write")
    command.add_argument("--exist-ok", action="store_true", help="do nothing if DIR already holds a readable model")
    command.set_defaults(func=_import)


def _import(args: argparse.Namespace) -> int:
    spec = import_gguf(args.gguf, args.out, exist_ok=args.exist_ok)
    sys.stdout.write(f"{args.out}: {spec.architecture}, {spec.layers} layers, {spec.vocab_size} tokens\n")
    return 0
