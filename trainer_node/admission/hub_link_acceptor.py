"""Gives each new connection to the part of the hub that its HELLO asks for."""

from __future__ import annotations

from collections.abc import Callable

from p2pcast.ground.errors import RefusedError
from p2pcast.relay.downstream import Downstream
from p2pcast.transport.link import Link, LinkOwner, QuietOwner
from p2pcast.trust.dial_permissions import ENROL
from p2pcast.wire import messages
from p2pcast.wire.connection import PARENT
from trainer_node.admission.admission import Admission
from trainer_node.ranks.rank_intake import RankIntake


class LinkAcceptor(QuietOwner):
    """``session(link, token)`` owns a control connection; ``token``: ident of the token that the peer has."""

    def __init__(
        self,
        children: Downstream,
        ranks: RankIntake,
        enrolment: Admission,
        session: Callable[[Link, bytes], LinkOwner],
    ) -> None:
        self._children = children
        self._ranks = ranks
        self._enrolment = enrolment
        self._session = session

    def accept_link(self, link: Link, hello: messages.Hello) -> None:
        """Raises RemoteError, RefusedError: then the link ends."""
        purpose = hello.purpose
        if purpose == "data":
            if hello.role == PARENT:
                raise RefusedError("a hub has no parent")
            link.owner = self._children
            self._children.accept(link)
        elif purpose == "publish":
            self._ranks.accept(link, hello)
        elif purpose == ENROL:
            self._enrolment.accept(link, hello)
        elif purpose == "engine":
            raise RefusedError("a hub leads no engine; dial the peer that does")
        else:
            link.owner = self._session(link, hello.token)
            link.expect_first_message("JOIN")
