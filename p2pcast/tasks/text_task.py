"""Base of tasks that speak text with a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from p2pcast.tasks.model_folder import chat_tokens
from p2pcast.tasks.task_hash import HashedTask, Settings


class TextTask(HashedTask):
    """``tokenizer``: the model's folder, its name in the cache of Hugging Face on this machine, or ``bytes``."""

    modules: ClassVar[Sequence[str]] = ("p2pcast.tasks.chat_tokens", "p2pcast.tasks.model_folder", "p2pcast.tasks.play")

    def __init__(self, tokenizer: str) -> None:
        self.chat = chat_tokens(tokenizer)

    @property
    def vocabulary(self) -> int:
        return self.chat.vocabulary

    @property
    def stop_token_ids(self) -> Sequence[int]:
        return self.chat.stop_token_ids

    @property
    def settings(self) -> Settings:
        return {"tokens": self.chat.digest.hex()}

    def text(self, token_ids: Sequence[int]) -> str:
        return self.chat.decode(token_ids)
