"""Passes each message to its handler, for all owners of connections. Pure.

A handler that needs only the record is listed under the record's class and gets the record. A handler that needs more,
such as the handle or the signed record, is listed under the message's type and gets the ``Message``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Record, Type

Handler = Callable[..., None]
Handlers = Mapping[type[Record] | Type, Handler]


def dispatch(handlers: Handlers, message: Message, *of: object) -> bool:
    """Call the handler of ``message``. ``of``: the handler's first arguments, such as the connection if the owner has
    several. Returns False if there is no handler, so that the message is ignored.
    """
    if (handler := handlers.get(type(message.body))) is not None:
        handler(*of, message.body)
    elif (handler := handlers.get(message.type)) is not None:
        handler(*of, message)
    return handler is not None
