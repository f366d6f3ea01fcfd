"""The tokens of a model, read from its folder: ``tokenizer.json``, the chat template, and the stop tokens.

A model without a chat template gets messages as plain paragraphs. Templates run in Jinja's sandbox; they cannot read
files or clocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import blake3

from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError
from p2pcast.tasks.chat_tokens import BYTES, ChatTokens, Messages, NoSystemRoleError, Render, byte_tokens

MAX_FILE_BYTES: Final = 256 * limits.MIB
"""Of a tokenizer's file; the largest known have 35 MB."""
MAX_VOCABULARY: Final = (1 << 32) - 1
FILES: Final = ("*.json", "*.jinja")
_MISSING: Final = "tasks in text need the packages tokenizers and jinja2: install the task's extra"
_DOMAIN: Final = b"p2pcast tokens of a model 1\0"


def chat_tokens(tokenizer: str) -> ChatTokens:
    """``tokenizer``: a model's folder, its name in the cache of Hugging Face on this machine, or ``bytes``."""
    return byte_tokens() if tokenizer == BYTES else _of_folder(_folder(tokenizer))


def _folder(tokenizer: str) -> Path:
    if (folder := Path(tokenizer).expanduser()).is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise LocalError(_MISSING) from None
    try:
        return Path(snapshot_download(tokenizer, allow_patterns=list(FILES), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        raise LocalError(
            f"tokenizer={tokenizer}: neither a folder nor a model in the cache of this machine: give the model's folder"
        ) from None


def _of_folder(folder: Path) -> ChatTokens:
    try:
        import tokenizers
    except ImportError:
        raise LocalError(_MISSING) from None
    written = _read(folder / "tokenizer.json")
    if written is None:
        raise LocalError(f"{folder} has no tokenizer.json: write it with transformers' save_pretrained")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(written.decode())
    except Exception as error:  # noqa: BLE001 - the package raises Exception itself
        raise LocalError(f"{folder / 'tokenizer.json'}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _document(folder / "tokenizer_config.json")
    names = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    template = _template(folder, settings)
    stops = _stop_token_ids(folder, tokenizer, names["eos_token"])
    vocabulary = max(tokenizer.get_vocab_size(), _size_of_model(folder))
    if not all(token < vocabulary for token in stops):
        raise LocalError(f"{folder}: a stop token lies outside the vocabulary of {vocabulary} tokens")
    hasher = blake3.blake3(_DOMAIN)
    for part in (written, (template or "").encode(), json.dumps([names, stops, vocabulary], sort_keys=True).encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return ChatTokens(
        vocabulary=vocabulary,
        stop_token_ids=stops,
        digest=hasher.digest(),
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False)),
        render=_plain if template is None else _rendering(template, names, folder),
    )


def _plain(messages: Messages) -> str:
    """Without a template: paragraphs, of which the last is the policy's."""
    return "".join(f"{message['content']}\n\n" for message in messages)


def _rendering(template: str, names: dict[str, str], folder: Path) -> Render:
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise LocalError(_MISSING) from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = as_json

    def render(messages: Messages) -> str:
        try:
            return compiled.render(messages=messages, add_generation_prompt=True, **names)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            if any(message["role"] == "system" for message in messages):
                raise NoSystemRoleError(str(error)) from None
            raise LocalError(f"{folder}: the chat template failed: {error}") from None

    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise LocalError(f"{folder}: the chat template is invalid: {error}") from None
    return render


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    written = _read(folder / "chat_template.jinja")
    if written is not None:
        return written.decode(errors="replace")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several templates, by name
        named = [one for one in found if isinstance(one, dict)]
        found = next((one.get("template") for one in named if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _stop_token_ids(folder: Path, tokenizer: Any, eos_token: str) -> tuple[int, ...]:
    """Raises LocalError for a model without one: its turns would never end."""
    for name in ("generation_config.json", "config.json"):
        found = _document(folder / name).get("eos_token_id")
        found = [found] if type(found) is int else found
        if isinstance(found, list) and found and all(type(token) is int and token >= 0 for token in found):
            return tuple(sorted(found))
    token = tokenizer.token_to_id(eos_token) if eos_token else None
    if token is None:
        raise LocalError(f"{folder} names no stop token: write eos_token_id into its generation_config.json")
    return (int(token),)


def _size_of_model(folder: Path) -> int:
    """Number of token ids that the model can sample: models are often padded. 0 if unknown."""
    config = _document(folder / "config.json")
    inner = config.get("text_config")
    given = (inner if isinstance(inner, dict) else config).get("vocab_size", 0)
    return given if type(given) is int and 0 <= given <= MAX_VOCABULARY else 0


def _token_text(value: Any) -> str:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _document(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty for a missing file."""
    if (written := _read(path)) is None:
        return {}
    try:
        found = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise LocalError(f"{path} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise LocalError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error}") from None
