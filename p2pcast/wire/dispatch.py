"""Passes each message to its handler: the one way in which owners of connections dispatch. Pure.

A table has a handler under the class of a record, and the handler takes the record. A handler of more than the record,
as of a handle or a signed record, is under the message's type, and takes the ``Message``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Record, Type

Handler = Callable[..., None]
Handlers = Mapping[type[Record] | Type, Handler]


def dispatch(handlers: Handlers, message: Message, *of: object) -> bool:
    """Call the handler of ``message``, if it has one. ``of``: first arguments of the handler, such as the connection of
    an owner of many. False: no handler, and the message is ignored.
    """
    if (handler := handlers.get(type(message.body))) is not None:
        handler(*of, message.body)
    elif (handler := handlers.get(message.type)) is not None:
        handler(*of, message)
    return handler is not None
