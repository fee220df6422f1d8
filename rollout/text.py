"""Between text and token ids: the tokenizer, the chat template, and what counts as a prompt.

A `Tokenizer` is built from the bytes of its files, so that any process can have the same one without the
model directory. It keeps no state between calls. `prompt_ids` is the one place where something that a driver
passes (a string, chat messages or ids) becomes ids; whatever it cannot accept is an `InvalidPromptError`.

Chat templates come with models, which makes them foreign code: they run in jinja2's sandbox, set up as Hugging
Face sets it up, and see plain JSON data only.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollout.errors import ConfigError, InvalidPromptError, ModelNotFoundError

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Text, chat messages of `role` and `content`, or token ids."""

_ALLOWED = "a string, a list of chat messages or a list of token ids, not empty"
_ANSWER = "3c1f5e0d9a7b"
"""Stands for an answer when a template is rendered; no message says it by chance."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a `Tokenizer` is built from; travels between processes."""

    tokenizer_json: bytes
    chat_template: str | None = None
    """Jinja source."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """What templates may name: `bos_token`, `eos_token`, …"""


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja (which wins).

    Raises `ModelNotFoundError` if there is no tokenizer.json, `ConfigError` for a file that cannot be used.
    """
    try:
        tokenizer_json = (path / "tokenizer.json").read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"{path / 'tokenizer.json'}: cannot read the tokenizer: {error.strerror}") from None
    config_path = path / "tokenizer_config.json"
    text = _read_text(config_path)
    try:
        config = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{config_path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{config_path}: expected an object, got {type(config).__name__}")
    template = _read_text(path / "chat_template.jinja")
    if template is None:
        template = _default_template(config_path, config.get("chat_template"))
    special_tokens = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            special_tokens[name] = token
    return TokenizerFiles(tokenizer_json=tokenizer_json, chat_template=template, special_tokens=special_tokens)


class Tokenizer:
    """Encodes and decodes text, renders chats. Raises `ConfigError` for files that it cannot be built from."""

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
        except ValueError as error:
            raise ConfigError(f"tokenizer.json: {error}") from None
        # Left over from training; Hugging Face switches both off too.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = dict(files.special_tokens)
        self._template = None if files.chat_template is None else _compile_template(files.chat_template)
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1
        """One more than the highest id."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with the tokens that the model expects around it (such as BOS) unless told otherwise."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat, ready for the assistant's answer unless `add_generation_prompt` is false.

        Raises `ConfigError` without a template, `InvalidPromptError` for messages that it or we refuse.
        """
        text = self._render(messages, add_generation_prompt=add_generation_prompt)
        return self._encode_prompt(text, add_special_tokens=False)

    def next_turn_ids(self, messages: Sequence[Mapping[str, Any]], *, last_id: int | None) -> list[int]:
        """Ids of chat messages that follow an answer which was sampled and stays as it is: from the end of that
        answer to where the assistant speaks again. `last_id` is the answer's last id; if it is the one that ends a
        turn, it is not repeated.

        The template is rendered with another answer, and what comes after that is taken. Raises as
        `apply_chat_template` does, also for a template that changes or drops answers.
        """
        if not messages:
            raise InvalidPromptError("got no messages, allowed: one or more that follow the assistant's")
        for index, message in enumerate(messages):
            _plain_message(index, message)
        stub = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
        _, found, after = self._render([*stub, *messages], add_generation_prompt=True).partition(_ANSWER)
        if not found:
            raise InvalidPromptError("this model's chat template does not keep what the assistant said; pass ids")
        if _ANSWER in after:
            raise InvalidPromptError("this model's chat template says what the assistant said twice; pass ids")
        ids = self._encode_prompt(after, add_special_tokens=False)
        return ids[1:] if ids and ids[0] == last_id else ids

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        if self._template is None:
            raise ConfigError("chat messages need a chat template, and this model's tokenizer has none")
        chat = [_plain_message(index, message) for index, message in enumerate(messages)]
        variables = {"messages": chat, "add_generation_prompt": add_generation_prompt, **self._special_tokens}
        try:
            # Templates test the last two against none, without asking first whether they are defined.
            return self._template.render(variables, tools=None, documents=None)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidPromptError(f"the chat template refused the messages: {error}") from None

    def prompt_ids(self, prompt: object, *, chat: bool) -> tuple[int, ...]:
        """Ids of a `Prompt`; with `chat`, a string is one user message if there is a template.

        Raises `InvalidPromptError` for anything but a string, chat messages or ids of this vocabulary.
        """
        match prompt:
            case str() if not prompt:
                raise InvalidPromptError(f"empty string; allowed: {_ALLOWED}")
            case str() if chat and self._template is not None:
                ids = self.apply_chat_template([{"role": "user", "content": prompt}])
            case str():
                ids = self._encode_prompt(prompt, add_special_tokens=True)
            case bytes() | bytearray():
                raise InvalidPromptError(f"got {type(prompt).__name__}; allowed: {_ALLOWED}")
            case Sequence() if len(prompt) == 0:
                raise InvalidPromptError(f"empty list; allowed: {_ALLOWED}")
            case Sequence() if isinstance(prompt[0], Mapping):
                if self._template is None:
                    raise InvalidPromptError("got chat messages, but this model's tokenizer has no chat template")
                ids = self.apply_chat_template(prompt)
            case Sequence():
                ids = [self._checked_id(index, item) for index, item in enumerate(prompt)]
            case _:
                raise InvalidPromptError(f"got {type(prompt).__name__}; allowed: {_ALLOWED}")
        if not ids:
            raise InvalidPromptError(f"{prompt!r:.80} has no tokens; at least one is needed")
        return tuple(ids)

    def _encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:  # what the library makes of a lone surrogate
            raise InvalidPromptError(f"{text!r:.80} is not valid Unicode") from None

    def _checked_id(self, index: int, item: object) -> int:
        if not isinstance(item, Integral) or isinstance(item, bool):
            raise InvalidPromptError(f"item {index}: got {type(item).__name__} ({item!r:.80}); allowed: {_ALLOWED}")
        if not 0 <= int(item) < self.vocab_size:
            raise InvalidPromptError(f"item {index}: got token id {item}, allowed: 0 … {self.vocab_size - 1}")
        return int(item)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read: {error}") from None


def _default_template(where: Path, value: object) -> str | None:
    """The template among the forms in use: absent, a string, or a list of {"name", "template"}."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        named = {item.get("name"): item.get("template") for item in value}
        if isinstance(template := named.get("default"), str):
            return template
        raise ConfigError(f"{where}: chat_template has no template named 'default', only {list(named)}")
    raise ConfigError(f"{where}: chat_template: got {type(value).__name__}, allowed: a string or a list of named ones")


def _plain_message(index: int, message: object) -> dict[str, Any]:
    """A copy made of plain JSON types: templates get no objects whose methods they could call."""
    if not isinstance(message, Mapping):
        raise InvalidPromptError(
            f"message {index}: got {type(message).__name__} ({message!r:.80}), allowed: an object with role and content"
        )
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            got = type(message[name]).__name__ if name in message else "nothing"
            raise InvalidPromptError(f"message {index}: {name}: got {got}, allowed: a string")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(message)))
    except (TypeError, ValueError) as error:
        raise InvalidPromptError(f"message {index}: not plain JSON: {error}") from None
    return plain


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said; for rendering it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"chat template: {error}") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
