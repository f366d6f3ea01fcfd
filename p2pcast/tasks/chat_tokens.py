"""Text as tokens for tasks that speak with a chat model: the opening of a play, and what the task says after a turn.

Promises: no token of the policy passes through text on its way to the next prompt. The task's words after a turn are
the text that the model's chat template puts behind an answer, encoded on their own. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import blake3

from p2pcast.ground.errors import LocalError

Messages = Sequence[Mapping[str, str]]
Render = Callable[[Messages], str]
"""From messages, each with ``role`` and ``content``, to the text that ends where the next answer begins."""

_ANSWER: Final = "p2pcast-marks-the-answer-here"
"""Stands for the policy's turn, to find what a template writes behind it."""
BYTES: Final = "bytes"
"""Name of the tokens without a model: one for each byte of UTF-8."""
_BEGIN, _END = "\x02", "\x03"
"""Control characters around each message of byte tokens."""


class NoSystemRoleError(LocalError):
    """The template refuses messages of the role ``system``."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """``vocabulary``: number of token ids. ``stop_token_ids``: one of them ends a turn. ``digest``: of all that
    decides the tokens of a text.
    """

    vocabulary: int
    stop_token_ids: tuple[int, ...]
    digest: bytes
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    render: Render

    def opening(self, system: str, user: str) -> list[int]:
        """The first prompt. A template without the role ``system`` gets both texts in one message."""
        asked = {"role": "user", "content": user}
        try:
            text = self.render([{"role": "system", "content": system}, asked])
        except NoSystemRoleError:
            text = self.render([asked | {"content": f"{system}\n\n{user}"}])
        return self.encode(text)

    def reply(self, said: Sequence[int], user: str) -> list[int]:
        """Tokens between a turn of the policy and its next turn. ``said``: the last turn; a stop token at its end is
        not repeated.
        """
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        text = self.render([*messages, {"role": "user", "content": user}])
        if text.count(_ANSWER) != 1:
            raise LocalError("the model's chat template does not repeat an answer as it was given: a play cannot go on")
        tokens = self.encode(text[text.index(_ANSWER) + len(_ANSWER) :])
        return tokens[1:] if self.ended(said) and tokens[:1] == [said[-1]] else tokens

    def ended(self, said: Sequence[int]) -> bool:
        """The policy ended its turn itself."""
        return bool(said) and said[-1] in self.stop_token_ids

    def spoken(self, said: Sequence[int]) -> str:
        """The text of a turn, without its stop token."""
        return self.decode(said[:-1] if self.ended(said) else said)


def byte_tokens() -> ChatTokens:
    """Tokens for models that know no text, and for tests."""

    def render(messages: Messages) -> str:
        said = "".join(f"{_BEGIN}{message['role']}\n{message['content']}{_END}\n" for message in messages)
        return f"{said}{_BEGIN}assistant\n"

    return ChatTokens(
        vocabulary=256,
        stop_token_ids=(ord(_END),),
        digest=blake3.blake3(b"p2pcast byte tokens 1").digest(),
        encode=lambda text: list(text.encode(errors="replace")),
        decode=lambda token_ids: bytes(t for t in token_ids if t < 256).decode(errors="replace"),
        render=render,
    )
