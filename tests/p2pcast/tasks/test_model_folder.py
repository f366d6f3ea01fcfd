"""Chat tokens of models, whose folders the tests write with the packages that write real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2pcast.ground.errors import LocalError
from p2pcast.tasks.chat_tokens import byte_tokens
from p2pcast.tasks.model_folder import chat_tokens

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra math")

START, END = "<|im_start|>", "<|im_end|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT


def model(folder: Path, template: str | None = CHAT, **settings: Any) -> Path:
    """A byte-level tokenizer with two special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([START, END])
    made.enable_truncation(4)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": END}, **settings}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_opening_is_the_models_template(tmp_path: Path) -> None:
    chat = chat_tokens(str(model(tmp_path)))
    opening = chat.opening("Play.", "Go <b>ü</b>")
    assert chat.decode(opening) == (
        "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nGo <b>ü</b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert opening.count(256) == 3  # a special token is one token


def test_a_template_without_a_system_role_gets_one_message(tmp_path: Path) -> None:
    chat = chat_tokens(str(model(tmp_path, NO_SYSTEM)))
    assert chat.decode(chat.opening("Play.", "Go")).startswith("<|im_start|>user\nPlay.\n\nGo<|im_end|>")


def test_a_reply_continues_the_template_after_every_end_of_a_turn(tmp_path: Path) -> None:
    for chat in (chat_tokens(str(model(tmp_path))), byte_tokens()):
        (end,) = chat.stop_token_ids
        opening = chat.opening("Play.", "Go")
        messages = [
            {"role": "system", "content": "Play."},
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": "I call"},
            {"role": "user", "content": "State 2"},
        ]
        for said in (chat.encode("I call"), [*chat.encode("I call"), end]):
            assert chat.decode(opening + said + chat.reply(said, "State 2")) == chat.render(messages)
            assert chat.spoken(said) == "I call"
        assert chat.ended([1, end])
        assert not chat.ended([end, 1])


def test_stop_tokens_and_vocabulary_come_from_the_models_files(tmp_path: Path) -> None:
    folder = model(tmp_path)
    assert chat_tokens(str(folder)).stop_token_ids == (257,)
    assert chat_tokens(str(folder)).vocabulary == 258
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 3]}')
    (folder / "config.json").write_text('{"vocab_size": 300, "eos_token_id": 5}')
    assert chat_tokens(str(folder)).stop_token_ids == (3, 257)
    assert chat_tokens(str(folder)).vocabulary == 300


def test_a_model_without_a_template_gets_paragraphs(tmp_path: Path) -> None:
    chat = chat_tokens(str(model(tmp_path, None)))
    assert chat.decode(chat.opening("Play.", "Go")) == "Play.\n\nGo\n\n"


def test_the_digest_changes_with_template_and_stop_tokens(tmp_path: Path) -> None:
    folder = model(tmp_path)
    first = chat_tokens(str(folder)).digest
    assert chat_tokens(str(folder)).digest == first
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    second = chat_tokens(str(folder)).digest
    (folder / "chat_template.jinja").write_text(CHAT + " ")
    assert len({first, second, chat_tokens(str(folder)).digest}) == 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "is no JSON"),
        (lambda f: (f / "tokenizer_config.json").write_text("{}"), "names no stop token"),
        (lambda f: (f / "chat_template.jinja").write_text("{% if"), "template is invalid"),
        (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 999}'), "outside the vocabulary"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_refused_with_the_reason(tmp_path: Path, change: Any, why: str) -> None:
    change(model(tmp_path))
    with pytest.raises(LocalError, match=why):
        chat_tokens(str(tmp_path))


def test_a_template_cannot_reach_the_machine(tmp_path: Path) -> None:
    chat = chat_tokens(str(model(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")))
    with pytest.raises(LocalError, match="template failed"):
        chat.opening("a", "b")


def test_a_name_that_is_no_folder_and_not_cached_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalError, match="neither a folder nor a model in the cache"):
        chat_tokens("p2pcast-tests/no-such-model")
    with pytest.raises(LocalError, match="neither a folder nor a model in the cache"):
        chat_tokens("a/b/c/d")
