"""What a script's source says that the script needs: modules, and files."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollout.errors import ConfigError


class Script:
    """A Python file, parsed."""

    def __init__(self, source: Path) -> None:
        """Raises `ConfigError` if it is not valid Python."""
        self._source = source
        try:
            self._tree = ast.parse(source.read_bytes(), filename=str(source))
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{source}: not valid Python: {error}") from None

    def modules(self) -> set[str]:
        """Names of what it imports, anywhere in it."""
        names: set[str] = set()
        for node in ast.walk(self._tree):
            match node:
                case ast.Import(names=aliases):
                    names |= {alias.name for alias in aliases}
                case ast.ImportFrom(module=str(module), level=0):
                    names.add(module)
        return names

    def constants(self, known: Mapping[str, Path]) -> dict[str, Path]:
        """Its module's names for paths; `known` are those that it imports."""
        found = dict(known)
        for node in self._tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if path := self._path(value, found):
                    found[name] = path
        return found

    def files(self, here: Path, constants: Mapping[str, Path]) -> Iterator[Path]:
        """What may be a file: a string, as a path below the directory `here`, or `Path(__file__).parent / "name"`."""
        for node in ast.walk(self._tree):
            match node:
                case ast.Constant(value=str(text)) if "." in text and text[0] != "/" and "\0" not in text:
                    yield here / text
                case ast.BinOp() if path := self._path(node, constants):
                    yield path

    def _path(self, node: ast.expr, constants: Mapping[str, Path]) -> Path | None:
        """What an expression that begins with `__file__` or a constant means; None for any other."""
        match node:
            case ast.Name(id=name):
                return constants.get(name)
            case ast.Call(func=ast.Name(id="Path"), args=[ast.Name(id="__file__")]):
                return self._source
            case ast.Call(func=ast.Attribute(value=inner, attr="resolve" | "absolute"), args=[]):
                return self._path(inner, constants)
            case ast.Attribute(value=inner, attr="parent"):
                path = self._path(inner, constants)
                return None if path is None else path.parent
            case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=str(name))):
                path = self._path(left, constants)
                return None if path is None else path / name
            case _:
                return None
