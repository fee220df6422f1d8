"""What a job needs of this machine: the files that are uploaded for it, and the command that it runs.

Uploaded, each at the same place below the job's working directory as below the current one:

1. the script and the modules that it imports from its own directory; `rollout`, if it is run from a checkout;
2. files of `FILE_BYTES` at most that the job's arguments name, or an uploaded YAML file under `path`, or an uploaded
   script, as a whole string or as `Path(__file__).parent / "name"`.

Directories, larger files and hidden ones that are named are not uploaded: their paths become absolute, and must be
readable on the nodes. Paths of outputs (`--out`, `--json`, `out`) become absolute, too, since Ray deletes a job's
working directory.
"""

import os
import shlex
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from rich import filesize

from rollout.cli.submit_script import Script
from rollout.config import RunConfig
from rollout.errors import ConfigError

FILE_BYTES = 1 << 20
"""Larger files stay where they are."""
PACKAGE_BYTES = 20 << 20
"""Of all files together, before they are compressed."""

CONFIGS = (".yaml", ".yml")
OUTPUTS = ("out", "json")
"""Names of options and fields whose paths are written."""
OWN = "rollout"
"""This package, which is uploaded whole or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    entrypoint: str
    """A shell command, to be run where the files are."""
    files: dict[str, bytes]
    """By path in the job's working directory."""
    read_in_place: tuple[str, ...]
    """Absolute paths of what is named and was not uploaded."""
    outputs: tuple[str, ...]
    """Absolute paths of what the job writes."""

    @property
    def named_files(self) -> list[str]:
        """Those that are not of this package."""
        return sorted(place for place in self.files if PurePosixPath(place).parts[0] != OWN)

    def archive(self) -> bytes:
        """As a zip file; the same files give the same bytes."""
        packed = BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for place in sorted(self.files):
                entry = zipfile.ZipInfo(place)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, self.files[place])
        return packed.getvalue()


def make_package(target: Path, arguments: Sequence[str], *, here: Path, checkout: Path | None) -> Package:
    """The job that runs `target` (YAML: `rollout run`; or a script) with `arguments`, as if in the directory `here`.

    `checkout`: the directory of the `rollout` package to upload; None: the cluster has one.
    Raises `ConfigError` for a target that cannot be run, and above `PACKAGE_BYTES`.
    """
    source = here / target
    if source.suffix not in (".py", *CONFIGS):
        raise ConfigError(f"{target}: expected a script (.py) or a configuration ({', '.join(CONFIGS)})")
    if not source.is_file():
        raise ConfigError(f"{target}: no such file")
    stage = _Stage(here)
    place = stage.place(source) or source.name
    if source.suffix in CONFIGS:
        stage.add_run(source, place)
        command = ["python", "-m", OWN, "run", place]
    else:
        stage.add_script(source, place, root=source.parent)
        command = ["python", place]
    command += stage.rewritten(arguments)
    if checkout is not None:
        stage.add_tree(checkout, OWN)
    return Package(
        entrypoint=shlex.join(command),
        files=stage.contents(),
        read_in_place=tuple(stage.read_in_place),
        outputs=tuple(stage.outputs),
    )


class _Stage:
    """Files that are to be uploaded, as they accumulate."""

    def __init__(self, here: Path) -> None:
        self._here = here
        self._files: dict[str, Path | bytes] = {}
        self._constants: dict[str, Path] = {}
        """Of all scripts: who imports one of these calls it the same."""
        self.read_in_place: dict[str, None] = {}
        self.outputs: dict[str, None] = {}

    def place(self, source: Path) -> str | None:
        """Where a file is uploaded to; None if it is not below the current directory."""
        path = PurePosixPath(os.path.relpath(source, self._here))
        return None if ".." in path.parts else str(path)

    def contents(self) -> dict[str, bytes]:
        """Raises `ConfigError` above `PACKAGE_BYTES`."""
        sizes = {
            place: len(file) if isinstance(file, bytes) else file.stat().st_size for place, file in self._files.items()
        }
        if sum(sizes.values()) > PACKAGE_BYTES:
            biggest = sorted(sizes, key=lambda place: -sizes[place])[:3]
            raise ConfigError(
                f"the job would upload {filesize.decimal(sum(sizes.values()))} in {len(sizes)} files, more than the "
                f"{filesize.decimal(PACKAGE_BYTES)} that are allowed; the biggest are "
                f"{', '.join(f'{place} ({filesize.decimal(sizes[place])})' for place in biggest)}"
            )
        return {place: file if isinstance(file, bytes) else file.read_bytes() for place, file in self._files.items()}

    # What is named

    def rewritten(self, arguments: Iterable[str]) -> Iterator[str]:
        """The job's arguments as they are there; files they name are added."""
        option = ""
        for word in arguments:
            yield self._output(word) if option[:2] == "--" and option[2:] in OUTPUTS else self._word(word)
            option = word

    def _word(self, word: str) -> str:
        key, equals, value = word.partition("=")
        if not equals:
            return self._plain(word)
        field = key.rpartition(".")[2].removeprefix("--")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            return word
        if isinstance(read, str):
            if field in (*OUTPUTS, "path"):
                return f"{key}={self._field(field, value)}"
            return f"{key}={self._plain(value)}"
        changed = self._section(read)
        return (
            word if changed == read else f"{key}={yaml.safe_dump(changed, default_flow_style=True, width=1e9).strip()}"
        )

    def _plain(self, word: str) -> str:
        """A word without `/` or `.` may be anything; it is no path."""
        return self._named(word) if ("/" in word or "." in word) and not word.startswith("-") else word

    def _named(self, text: str) -> str:
        source = self._here / text
        if not _exists(source):
            return text
        place = self.place(source)
        if not Path(text).is_absolute() and place is not None and _is_small(source) and not _is_hidden(place):
            self._add(source, place)
            return text
        absolute = os.path.abspath(source)
        self.read_in_place[absolute] = None
        return absolute

    def _output(self, text: str) -> str:
        absolute = os.path.abspath(self._here / text)
        self.outputs[absolute] = None
        return absolute

    # What is added

    def _add(self, source: Path, place: str) -> None:
        if place in self._files:
            return
        self._files[place] = source
        if source.suffix in CONFIGS:
            try:
                raw = yaml.safe_load(source.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError):
                return  # whoever reads it complains
            self._add_yaml(raw, self._section(raw), place)

    def _add_yaml(self, raw: Any, changed: Any, place: str) -> None:
        if changed != raw:
            self._files[place] = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True).encode()

    def add_run(self, source: Path, place: str) -> None:
        """A configuration of `rollout run`, whose output has a default."""
        self._files[place] = source
        try:
            raw = yaml.safe_load(source.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("run", {}), dict):
            raise ConfigError(f"{source}: expected a mapping of sections")
        run = {"out": str(RunConfig.model_fields["out"].default)} | raw.get("run", {})
        self._add_yaml(raw, self._section(raw | {"run": run}), place)

    def _section(self, value: Any) -> Any:
        match value:
            case dict():
                return {key: self._field(key, inner) for key, inner in value.items()}
            case list():
                return [self._section(inner) for inner in value]
            case _:
                return value

    def _field(self, key: Any, value: Any) -> Any:
        if not isinstance(value, str):
            return self._section(value)
        if key in OUTPUTS:
            return self._output(value)
        return self._named(value) if key == "path" else value

    def add_script(self, source: Path, place: str, *, root: Path) -> None:
        """A Python file, what it imports from `root`, and the files that its strings name."""
        if place in self._files:
            return
        self._files[place] = source
        script = Script(source)
        for name in sorted(script.modules()):
            self._add_module(name, root)
        self._constants = script.constants(self._constants)
        for file in script.files(self._here, self._constants):
            inside = self.place(file)
            if inside is not None and _is_small(file) and not _is_hidden(inside):
                self._add(file, inside)

    def _add_module(self, name: str, root: Path) -> None:
        top = name.partition(".")[0]
        if top == OWN:
            return
        file, package = root / f"{top}.py", root / top
        if file.is_file():
            self.add_script(file, self._beside(file, root), root=root)
        elif package.is_dir() and any(package.rglob("*.py")):
            self.add_tree(package, self._beside(package, root), root=root)

    def _beside(self, path: Path, root: Path) -> str:
        return self.place(path) or path.relative_to(root).as_posix()

    def add_tree(self, directory: Path, place: str, *, root: Path | None = None) -> None:
        """All of a package but hidden files and byte code; with a `root`, what it imports from there, too."""
        for source in sorted(directory.rglob("*")):
            inner = source.relative_to(directory)
            if not source.is_file() or any(part[0] == "." or part == "__pycache__" for part in inner.parts):
                continue
            if source.suffix == ".py" and root is not None:
                self.add_script(source, f"{place}/{inner.as_posix()}", root=root)
            else:
                self._files.setdefault(f"{place}/{inner.as_posix()}", source)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a name
        return False


def _is_hidden(place: str) -> bool:
    """Such files may hold secrets."""
    return any(part.startswith(".") for part in PurePosixPath(place).parts)


def _is_small(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= FILE_BYTES
    except OSError:
        return False
