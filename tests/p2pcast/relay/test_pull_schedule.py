"""Sources come and go, hold different pieces and send at different rates. Each piece is asked of one source at a time,
of a source that holds it, until all pieces are here.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.artifact.piece_set import indices_of, ranges_of
from p2pcast.relay.pull_schedule import CancelPieces, LeaveParent, PullSchedule, RequestPieces
from p2pcast.relay.tuning import PULL_LATE_S, PULL_STALL_S, PULL_WINDOW_LEAST_BYTES, PULL_WINDOW_MOST_BYTES

PIECE = 65536
A, B = bytes(16), bytes([1]) * 16


class World:
    """Sources with their own pieces and rates, on a simulated clock. Every instruction is checked."""

    def __init__(self, scattering: PullSchedule, seed: int = 0) -> None:
        self.scattering, self.draw = scattering, random.Random(seed)
        self.now = 0.0
        self.has: dict[bytes, dict[bytes, set[int]]] = {}
        self.bytes_s: dict[bytes, float] = {}
        self.queue: dict[bytes, list[tuple[bytes, int]]] = {}
        self.budget: Counter[bytes] = Counter()
        self.pieces: dict[bytes, int] = {}
        self.held: dict[bytes, set[int]] = {}
        self.asked: dict[tuple[bytes, int], bytes] = {}
        self.sent: Counter[bytes] = Counter()
        self.most_owed: Counter[bytes] = Counter()

    def want(self, artifact: bytes, pieces: int, *, held: set[int] = frozenset(), begin: float = 0.0) -> None:
        self.pieces[artifact], self.held[artifact] = pieces, set(held)
        self.scattering.want(artifact, begin)

    def source(self, name: bytes, has: dict[bytes, set[int]], bytes_s: float = 1e6, *, sealed: bool = True) -> None:
        self.has[name], self.bytes_s[name], self.queue[name] = has, bytes_s, []
        self.scattering.found(name, self.now)
        for artifact, pieces in has.items():
            self.scattering.holds(name, artifact, ranges_of(sorted(pieces)), sealed=sealed)

    def begin(self) -> None:
        """The directory is asked for first, then pieces."""
        self.step()
        self.step()

    def lose(self, name: bytes) -> None:
        self.scattering.lost(name)
        del self.has[name], self.bytes_s[name], self.queue[name]
        self.asked = {key: source for key, source in self.asked.items() if source != name}

    def step(self, passed_s: float = 0.05) -> list:
        self.now += passed_s
        done = self.scattering.decide(self.now)
        for instruction in done:
            self._carry_out(instruction)
        for name in list(self.queue):
            self._send(name, passed_s)
        for artifact in list(self.pieces):
            if self.held[artifact] == set(range(self.pieces[artifact])):
                self.scattering.done(artifact)
                del self.pieces[artifact]
        return done

    def _carry_out(self, instruction) -> None:
        name = instruction.source
        assert name in self.has, "only known sources are asked"
        if isinstance(instruction, RequestPieces):
            if instruction.seal:
                self.scattering.directory(
                    instruction.artifact, self.pieces[instruction.artifact], PIECE, self.held[instruction.artifact]
                )
            for piece in indices_of(instruction.pieces, 1 << 20):
                key = instruction.artifact, piece
                assert key not in self.asked, "a piece is asked of one source at a time"
                assert piece not in self.held[instruction.artifact]
                assert piece in self.has[name].get(instruction.artifact, ()), "a piece is asked of a source that has it"
                self.asked[key] = name
                self.queue[name].append(key)
            self.most_owed[name] = max(self.most_owed[name], len(self.queue[name]) * PIECE)
            assert len(self.queue[name]) * PIECE <= max(PULL_WINDOW_MOST_BYTES, PULL_WINDOW_LEAST_BYTES)
        elif isinstance(instruction, CancelPieces):
            wanted = {(instruction.artifact, piece) for piece in indices_of(instruction.pieces, 1 << 20)}
            assert wanted <= set(self.queue[name])
            back = [key for key in self.queue[name][1:] if key in wanted]
            self.queue[name] = [key for key in self.queue[name] if key not in back]
            for key in back:
                del self.asked[key]
            self.scattering.cancelled(name, instruction.artifact, ranges_of(sorted(piece for _, piece in back)))
        elif isinstance(instruction, LeaveParent):
            self.lose(name)

    def _send(self, name: bytes, passed_s: float) -> None:
        room = self.bytes_s[name] * passed_s + self.budget.pop(name, 0)
        while self.queue[name] and room >= PIECE:
            artifact, piece = self.queue[name].pop(0)
            room -= PIECE
            del self.asked[artifact, piece]
            assert piece not in self.held[artifact], "no piece comes twice"
            self.held[artifact].add(piece)
            self.sent[name] += 1
            self.scattering.received(name, PIECE, self.now)
            self.scattering.got(name, artifact, piece)
        if self.queue[name]:
            self.budget[name] = int(room)

    def run(self, most_s: float = 300.0) -> float:
        until = self.now + most_s
        while self.pieces:
            assert self.now < until, "pulling ends in time"
            self.step()
        return self.now


def every(pieces: int) -> set[int]:
    return set(range(pieces))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 1 << 32))
def test_every_piece_comes_once_while_sources_come_and_go(data, seed):
    draw = random.Random(seed)
    sizes = {A: draw.randint(1, 120), B: draw.randint(1, 40)}
    world = World(PullSchedule(), seed)
    for artifact, pieces in sizes.items():
        world.want(artifact, pieces, held={p for p in range(pieces) if draw.random() < 0.2}, begin=draw.random())
    keeper = b"keeper"
    world.source(keeper, {a: every(n) for a, n in sizes.items()}, draw.choice([2e5, 1e6, 1e8]))
    for number in range(data.draw(st.integers(0, 60))):
        what = draw.random()
        names = [name for name in world.has if name != keeper]
        if what < 0.3:
            has = {a: {p for p in range(n) if draw.random() < 0.5} for a, n in sizes.items()}
            world.source(b"%d" % number, has, draw.choice([0.0, 1e4, 1e6, 1e8]), sealed=draw.random() < 0.5)
        elif what < 0.45 and names:
            world.lose(draw.choice(names))
        elif what < 0.6 and names:
            world.bytes_s[draw.choice(names)] = draw.choice([0.0, 1e5, 1e7])
        else:
            world.step(draw.choice([0.01, 0.1, 1.0]))
    world.run()
    assert {a: len(world.held[a]) for a in sizes} == sizes


def test_sources_are_asked_in_proportion_to_their_rates():
    world = World(PullSchedule())
    world.want(A, 2000)
    rates = {b"slow": 5e5, b"middle": 2e6, b"quick": 8e6}
    for name, bytes_s in rates.items():
        world.source(name, {A: every(2000)}, bytes_s)
    ideal_s = 2000 * PIECE / sum(rates.values())
    assert world.run() <= 1.15 * ideal_s + PULL_LATE_S
    assert world.sent[b"slow"] < world.sent[b"middle"] < world.sent[b"quick"]


def test_the_rarest_pieces_are_asked_for_first():
    world = World(PullSchedule())
    world.want(A, 100)
    world.source(b"whole", {A: every(100)}, 1e6)
    for name in (b"x", b"y"):
        world.source(name, {A: set(range(60))}, 0.0)
    world.begin()
    asked = [key[1] for key in world.queue[b"whole"]]
    assert asked
    assert min(asked) >= 60


def test_two_nodes_that_pull_one_artifact_begin_at_different_pieces():
    first: list[set[int]] = []
    for begin in (0.0, 0.5):
        world = World(PullSchedule())
        world.want(A, 1000, begin=begin)
        world.source(b"hub", {A: every(1000)}, 0.0)
        world.begin()
        first.append({key[1] for key in world.queue[b"hub"]})
    assert first[0]
    assert not first[0] & first[1]


def test_pieces_of_a_lost_source_are_asked_of_another_at_once():
    world = World(PullSchedule())
    world.want(A, 4)
    world.source(b"x", {A: every(4)}, 0.0)
    world.begin()
    owed = {piece for _, piece in world.queue[b"x"]}
    assert owed
    world.source(b"y", {A: every(4)}, 1e8)
    world.lose(b"x")
    world.step()
    assert owed <= world.held[A] | {piece for _, piece in world.queue[b"y"]}


def test_at_the_end_a_slow_source_gives_back_unsent_pieces():
    world = World(PullSchedule())
    world.want(A, 400)
    world.source(b"slow", {A: every(400)}, 3e4)
    world.source(b"quick", {A: every(400)}, 2e7)
    assert world.run() < 6 * PULL_LATE_S, "the slow source alone would take 9 s for its pieces"
    assert world.sent[b"slow"] >= 1


def test_a_silent_source_is_left_and_a_slow_source_is_kept():
    world = World(PullSchedule())
    world.want(A, 100)
    world.source(b"mute", {A: every(100)}, 0.0)
    world.source(b"trickle", {A: every(100)}, 0.0)
    left: set[bytes] = set()
    for _ in range(int(3 * PULL_STALL_S / 0.25)):
        if b"trickle" in world.has:
            world.scattering.received(b"trickle", 2000, world.now)
        left |= {i.source for i in world.step(0.25) if isinstance(i, LeaveParent)}
    assert left == {b"mute"}


def test_an_earlier_artifact_precedes_a_later_artifact():
    world = World(PullSchedule())
    world.want(B, 10)
    world.want(A, 10)
    world.source(b"x", {A: every(10), B: every(10)}, 1e6)
    while B in world.pieces:
        world.step()
        assert not world.held[A] or len(world.held[B]) + len([k for k in world.asked if k[0] == B]) == 10


def test_new_pieces_of_a_pulling_source_are_requested():
    world = World(PullSchedule())
    world.want(A, 10)
    world.source(b"hub", {A: every(10)}, 0.0)
    world.step()
    world.lose(b"hub")
    world.source(b"other", {A: {1}}, 1e8, sealed=False)
    world.step()
    assert world.held[A] == {1}
    assert not world.scattering.whole(A)
    world.has[b"other"][A] |= {2, 3}
    world.scattering.holds(b"other", A, [1, 4], sealed=False)
    world.step()
    assert world.held[A] == {1, 2, 3}
    world.scattering.refused(b"other", A, [0, 1 << 30])
    world.source(b"again", {A: every(10)}, 1e8)
    assert world.scattering.whole(A)
    world.run()


def test_refused_pieces_are_not_requested_again():
    world = World(PullSchedule())
    world.want(A, 10)
    world.source(b"liar", {A: every(10)}, 0.0)
    world.begin()
    owed = [piece for _, piece in world.queue[b"liar"]]
    assert world.scattering.expects(b"liar", A, owed[0])
    world.queue[b"liar"].clear()
    world.asked.clear()
    world.scattering.cancelled(b"liar", A, ranges_of(sorted(owed)))
    assert not world.scattering.expects(b"liar", A, owed[0])
    for _ in range(20):
        world.step()
    assert not {piece for _, piece in world.queue[b"liar"]} & set(owed)
    world.source(b"other", {A: every(10)}, 1e7)
    world.lose(b"liar")
    world.run()
