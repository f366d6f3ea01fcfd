from __future__ import annotations

from recorder import Recorder

from p2pcast.ground.version import Version
from p2pcast.wire import messages
from rollout_node.hub_messages import HubMessages

A, B = b"a" * 16, b"b" * 16


class Parts:
    orders: Recorder
    parent_failover: Recorder
    connector: Recorder
    downloader: Recorder
    squashes: Recorder
    catalog_updater: Recorder
    saved: Recorder

    def __init__(self, **group) -> None:
        self.replanned = 0
        self.downstream = object()
        for name in Parts.__annotations__:
            setattr(self, name, Recorder())
        self.lead, self.member = group.get("lead"), group.get("member")
        self.handlers = HubMessages(
            **{name: getattr(self, name) for name in Parts.__annotations__},
            downstream=self.downstream,
            lead=self.lead,
            member=self.member,
            replan=self.replan,
        ).handlers()

    def take(self, record) -> None:
        self.handlers[type(record)](record)

    def replan(self) -> None:
        self.replanned += 1


def test_a_plan_names_parent_and_backups():
    parts = Parts()
    parts.take(messages.Plan((3, 4), A, "h", 7, [(B, "i", 8)]))
    parts.take(messages.Plan((3, 4), None, "", 0, [(B, "i", 8)]))
    assert parts.parent_failover.named("order") == [((3, 4), (A, "h", 7), [(B, "i", 8)]), ((3, 4), None, [(B, "i", 8)])]


def test_neighbours_and_sources_are_places():
    parts = Parts()
    parts.take(messages.Neighbours([(A, "h", 7)]))
    parts.take(messages.Sources(B, [(A, "h", 7)]))
    assert parts.parent_failover.named("introduce") == [[(A, "h", 7)]]
    assert parts.downloader.named("add_sources") == [(B, [(A, "h", 7)])]


def test_address_messages_go_to_the_connector():
    parts = Parts()
    called = messages.Called(A, 2, [])
    for record in (messages.Addresses([]), messages.Unreachable(A), called):
        parts.take(record)
    assert parts.connector.names == ["learn_addresses", "stop_waiting", "dial_child"]
    assert parts.connector.named("dial_child") == [(called, parts.downstream)]


async def test_a_catalog_is_applied():
    parts = Parts()
    catalog = messages.Catalog([], [])
    parts.take(catalog)
    ((body, now),) = parts.catalog_updater.named("apply")
    assert body is catalog
    assert now > 0


def test_hold_and_commit_are_orders_and_change_the_path():
    parts = Parts()
    parts.take(messages.Hold(Version(0, 5)))
    parts.take(messages.Commit(Version(0, 6)))
    assert parts.orders.calls == [("hold_at", (Version(0, 5),), {}), ("commit_to", (Version(0, 6),), {})]
    assert parts.replanned == 2


async def test_the_answer_on_a_squash_changes_the_path():
    parts = Parts()
    parts.take(messages.Squashing(Version(0, 1), None, 0, 0))
    assert parts.squashes.names == ["answered"]
    assert parts.replanned == 1


def test_a_lead_saves_its_members():
    parts = Parts(lead=Recorder(name="big"))
    parts.take(messages.Engine("big", None, [A, B]))
    parts.take(messages.Engine("big", None))
    assert parts.lead.named("set_members") == [[A, B], ()]
    assert parts.saved.calls[0] == ("keep", (), {"members": ["big", [A.hex(), B.hex()]]})


def test_a_member_saves_only_an_existing_lead():
    parts = Parts(member=Recorder())
    parts.take(messages.Engine("big", (A, "h", 7)))
    parts.take(messages.Engine("big", None))
    assert parts.member.named("set_lead") == [(A, "h", 7), None]
    assert parts.saved.calls == [("keep", (), {"lead": [A.hex(), "h", 7]})]


def test_a_peer_without_an_engine_of_several_hosts_ignores_engine():
    parts = Parts()
    parts.take(messages.Engine("big", (A, "h", 7)))
    assert parts.saved.calls == []
