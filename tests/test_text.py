"""The tokenizer says what Hugging Face's says, and every malformed prompt is refused by name."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rollout.errors import ConfigError, InvalidPromptError, ModelNotFoundError
from rollout.text import Tokenizer, TokenizerFiles, read_tokenizer_files

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": "Hi <|im_end|> there\n\n  \N{SNOWMAN}"},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "  Bye. "},
    ],
    [{"role": "user", "content": ""}],
]


@pytest.fixture(scope="module")
def files(smollm2_path: Path) -> TokenizerFiles:
    return read_tokenizer_files(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer(files)


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


def with_template(files: TokenizerFiles, template: str | None) -> Tokenizer:
    return Tokenizer(
        TokenizerFiles(tokenizer_json=files.tokenizer_json, chat_template=template, special_tokens=files.special_tokens)
    )


def rendered(files: TokenizerFiles, template: str, content: str = "x", **extra: Any) -> str:
    tokenizer = with_template(files, template)
    return tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": content, **extra}]), False)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["<|im_start|>user\n1 + 1<|im_end|>"]))
def test_encode_and_decode_agree_with_hugging_face(tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_chats_agree_with_hugging_face(
    tokenizer: Tokenizer, theirs: Any, chat: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    expected = theirs.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert tokenizer.apply_chat_template(chat, add_generation_prompt) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}|\n    {% endif %}\n{% endfor %}\nend",
        "{{ bos_token }}{{ eos_token }}{{ messages[0] | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{{ strftime_now('%Y') }}",
        "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}{% endfor %}{{ ns.last }}",
        "{{ nothing }}{{ nothing is defined }}{{ tools is defined and tools }}",
    ],
)
def test_templates_are_rendered_as_hugging_face_renders_them(files: TokenizerFiles, theirs: Any, template: str) -> None:
    chat = [{"role": "user", "content": "<1 & 'é'>"}, {"role": "assistant", "content": "2"}]
    expected = theirs.apply_chat_template(chat, chat_template=template, return_dict=False)
    assert with_template(files, template).apply_chat_template(chat, add_generation_prompt=False) == expected


def test_the_vocabulary_is_that_of_hugging_face(tokenizer: Tokenizer, theirs: Any) -> None:
    assert tokenizer.vocab_size == len(theirs) == max(theirs.get_vocab().values()) + 1


def test_files_travel(files: TokenizerFiles) -> None:
    assert pickle.loads(pickle.dumps(files)) == files
    assert files.special_tokens["eos_token"] == "<|im_end|>"


def test_truncation_and_padding_left_in_the_file_are_switched_off(files: TokenizerFiles) -> None:
    content = json.loads(files.tokenizer_json)
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    altered = Tokenizer(TokenizerFiles(tokenizer_json=json.dumps(content).encode()))
    text = "one two three four five"
    assert altered.encode(text) == Tokenizer(files).encode(text)


def test_a_string_is_one_user_message_when_chatting(tokenizer: Tokenizer) -> None:
    expected = tuple(tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1 ="}]))
    assert tokenizer.prompt_ids("1 + 1 =", chat=True) == expected
    assert tokenizer.prompt_ids("1 + 1 =", chat=False) == tuple(tokenizer.encode("1 + 1 ="))


def test_a_string_is_plain_without_a_template(files: TokenizerFiles) -> None:
    tokenizer = with_template(files, None)
    assert tokenizer.prompt_ids("1 + 1 =", chat=True) == tuple(tokenizer.encode("1 + 1 ="))


def test_messages_are_chats_and_ids_are_ids_either_way(tokenizer: Tokenizer) -> None:
    for chat in (True, False):
        assert tokenizer.prompt_ids(CHATS[1], chat=chat) == tuple(tokenizer.apply_chat_template(CHATS[1]))
        assert tokenizer.prompt_ids([5, np.int64(7)], chat=chat) == (5, 7)
        assert tokenizer.prompt_ids((0, tokenizer.vocab_size - 1), chat=chat) == (0, tokenizer.vocab_size - 1)
    assert all(type(token) is int for token in tokenizer.prompt_ids([np.int64(7)], chat=False))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "got NoneType; allowed: a string, a list"),
        (7, "got int"),
        (1.5, "got float"),
        ({"role": "user", "content": "x"}, "got dict"),
        ({1, 2}, "got set"),
        (b"bytes", "got bytes"),
        (np.array([1, 2]), "got ndarray"),
        ("", "empty string"),
        ([], "empty list"),
        ((), "empty list"),
        (["text"], r"item 0: got str \('text'\)"),
        ([1, True], r"item 1: got bool \(True\)"),
        ([1, 2.0], r"item 1: got float \(2.0\)"),
        ([1, None], "item 1: got NoneType"),
        ([1, [2]], "item 1: got list"),
        ([3, -1], "item 1: got token id -1, allowed: 0 …"),
        ([49152], "item 0: got token id 49152, allowed: 0 … 49151"),
        ([2**70], "item 0: got token id"),
        ([1, {"role": "user", "content": "x"}], "item 1: got dict"),
        ([{"role": "user", "content": "x"}, 1], "message 1: got int"),
        ([{"role": "user"}], "message 0: content: got nothing, allowed: a string"),
        ([{"content": "x"}], "message 0: role: got nothing"),
        ([{}], "message 0: role: got nothing"),
        ([{"role": None, "content": "x"}], "message 0: role: got NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "message 0: content: got list"),
        ([{"role": "user", "content": "x", "seen": {1}}], "message 0: not plain JSON"),
        ("\ud800", "not valid Unicode"),
        ([{"role": "user", "content": "\udfff"}], "not valid Unicode"),
    ],
)
def test_a_malformed_prompt_is_refused_with_what_was_received(
    tokenizer: Tokenizer, prompt: object, message: str
) -> None:
    for chat in (True, False):
        with pytest.raises(InvalidPromptError, match=message):
            tokenizer.prompt_ids(prompt, chat=chat)


def test_a_long_bad_prompt_makes_a_short_message(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        tokenizer.prompt_ids(["long" * 1000], chat=False)
    assert len(str(caught.value)) < 300


def test_a_template_that_renders_nothing_leaves_no_prompt(files: TokenizerFiles) -> None:
    with pytest.raises(InvalidPromptError, match="no tokens"):
        with_template(files, "{{ nothing }}").prompt_ids("x", chat=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 + messages[0].content }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at_all }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_that_fails_refuses_the_prompt(files: TokenizerFiles, template: str) -> None:
    tokenizer = with_template(files, template)
    with pytest.raises(InvalidPromptError, match="the chat template refused the messages: "):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_other_keys_of_a_message_reach_the_template_as_plain_data(files: TokenizerFiles) -> None:
    assert rendered(files, "{{ messages[0].name }}", name="Ann") == "Ann"

    class Loud(str):
        def shout(self) -> str:
            return self.upper()

    assert rendered(files, "{{ messages[0].content.shout is defined }}", content=Loud("a")) == "False"


def test_chat_messages_without_a_template(files: TokenizerFiles) -> None:
    tokenizer = with_template(files, None)
    with pytest.raises(ConfigError, match="has none"):
        tokenizer.apply_chat_template(CHATS[0])
    with pytest.raises(InvalidPromptError, match="no chat template"):
        tokenizer.prompt_ids(CHATS[0], chat=True)


def test_a_broken_template_is_a_broken_model(files: TokenizerFiles) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        with_template(files, "{% if %}")


def test_broken_tokenizer_bytes_are_a_broken_model() -> None:
    for content in (b"{}", b"hello", b"\xff"):
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            Tokenizer(TokenizerFiles(tokenizer_json=content))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
            read_tokenizer_files(path)


TURNS = [
    [{"role": "user", "content": "And 3 + 3?"}],
    [{"role": "tool", "content": "4"}, {"role": "user", "content": "  Is it?\n"}],
    [{"role": "system", "content": ""}],
]


@pytest.mark.parametrize("chat", CHATS[:2])
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("answer", ["It is 4.", "", " the", "4\n"])
def test_a_next_turn_continues_an_answer_as_the_template_does(
    tokenizer: Tokenizer, chat: list[dict[str, str]], turn: list[dict[str, str]], answer: str
) -> None:
    prompt = tokenizer.apply_chat_template(chat)
    sampled = [*tokenizer.encode(answer, add_special_tokens=False), *tokenizer.encode("<|im_end|>")]
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": answer}, *turn])
    stopped = prompt + sampled
    assert stopped + tokenizer.next_turn_ids(turn, last_id=stopped[-1]) == whole
    cut = prompt + sampled[:-1]  # it did not end its turn itself
    assert cut + tokenizer.next_turn_ids(turn, last_id=cut[-1]) == whole


def test_an_answer_that_no_text_would_give_stays_as_it_was_sampled(tokenizer: Tokenizer) -> None:
    odd = [*tokenizer.encode("1"), *tokenizer.encode("2"), *tokenizer.encode("<|im_end|>")]
    one, other = ([*odd[:-1], odd[-1]], [*tokenizer.encode("completely different"), odd[-1]])
    assert tokenizer.next_turn_ids(TURNS[0], last_id=one[-1]) == tokenizer.next_turn_ids(TURNS[0], last_id=other[-1])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "does not keep what the assistant"),
        ("{{ messages[-1].content }}", "does not keep what the assistant said; pass ids"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not keep what the assistant"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "says what the assistant said twice"),
        ("{{ raise_exception('no') }}", "the chat template refused the messages: no"),
    ],
)
def test_a_template_by_which_no_turn_can_be_told_is_refused(files: TokenizerFiles, template: str, message: str) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        with_template(files, template).next_turn_ids(TURNS[0], last_id=None)


def test_a_next_turn_needs_messages_and_a_template(files: TokenizerFiles, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidPromptError, match="got no messages"):
        tokenizer.next_turn_ids([], last_id=None)
    with pytest.raises(ConfigError, match="has none"):
        with_template(files, None).next_turn_ids(TURNS[0], last_id=None)
    with pytest.raises(InvalidPromptError, match="message 0: content: got nothing"):
        tokenizer.next_turn_ids([{"role": "user"}], last_id=None)


def directory(path: Path, config: Any = None, jinja: str | None = None) -> Path:
    (path / "tokenizer.json").write_text("{}")
    if config is not None:
        (path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    return path


@pytest.mark.parametrize(
    ("config", "jinja", "template"),
    [
        (None, None, None),
        ({}, None, None),
        ({"chat_template": None}, None, None),
        ({"chat_template": "one"}, None, "one"),
        ({"chat_template": "one"}, "file", "file"),
        (None, "file", "file"),
        (
            {"chat_template": [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]},
            None,
            "b",
        ),
    ],
)
def test_the_template_is_found_where_models_keep_it(
    tmp_path: Path, config: Any, jinja: str | None, template: str | None
) -> None:
    assert read_tokenizer_files(directory(tmp_path, config, jinja)).chat_template == template


def test_special_tokens_are_read_in_both_forms(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    assert read_tokenizer_files(directory(tmp_path, config)).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        ([], "expected an object, got list"),
        ({"chat_template": 3}, "got int, allowed: a string or a list"),
        ({"chat_template": ["a"]}, "got list, allowed"),
        (
            {"chat_template": [{"name": "tool_use", "template": "a"}]},
            "no template named 'default', only \\['tool_use'\\]",
        ),
    ],
)
def test_an_unusable_tokenizer_config_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tokenizer_files(directory(tmp_path, config))
