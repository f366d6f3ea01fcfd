"""Constants that set the relay's pace, each with its unit, its reason and the measurement that chose it.

"Derived" means that the value follows from quantities that are stated with it; tests/p2pcast/relay/test_tuning.py
holds the values to these derivations. "Not measured" means that no run compared the value with another. The sections
named are in docs/design/decisions/stripes.md, which lists what is still without a measurement.
"""

from __future__ import annotations

from typing import Final

from p2pcast.ground import limits

# -- stripes in use (p2pcast.relay.active_stripes); section "Which stripes are used"

NARROW_STRIPES: Final = 2
"""Stripes in use on a narrow path, with BBR. Measured at 10 Mbit/s and 100 ms: two carry 0.90 of the path and more,
four 0.77 to 0.89, eight 0.58 to 0.65.
"""
NARROW_BPS: Final = 20e6
"""Bits per second below which a path may be narrow. Measured on both sides: at 10 Mbit/s two stripes are better, at
30 Mbit/s and 150 ms four are (0.91 against 0.87). The value between was not measured. Within a site, stripes exist for
busy processors, and no processor is too busy for so little.
"""
NARROW_IN_FLIGHT_BYTES: Final = 250_000
"""Bytes in flight above which no path is narrow. Measured at 10 Mbit/s and 300 ms (375 kB): neither is better. Four
carry 0.70 to 0.76 without loss and 0.71 with 0.5 %; two carry 0.66 and 0.74 to 0.81.
"""
RAISE_MARGIN: Final = 1.25
"""Factor by which one measured rate has to exceed the narrow limits before more stripes are used. Derived: BBR probes a
path at 1.25 times its rate, so a sample below that may be a probe.
"""
HELD_BACK_SHARE: Final = 0.5
"""Share of busy time, limited by a window, from which the stripes in use are doubled. The value was not measured. The
rule was: with buffers of 64 KiB, at 50 Mbit/s and 150 ms, it raises 8 Mbit/s (four stripes) to 14 to 16 (eight).
"""
RATE_SAMPLE_S: Final = 1.0
"""Least seconds of one rate sample. Derived: at NARROW_BPS a second is 38 of a delta's pieces, so a piece under way at
either end is 5 % of the rate. In a quarter of a second it would be 21 %, nearly RAISE_MARGIN.
"""
RATE_SAMPLE_ROUND_TRIPS: Final = 8
"""Least round trips of one rate sample. Derived: BBR's gains repeat after eight round trips (1.25, 0.75, six times 1),
so a sample is at the mean gain, 1.
"""
RATE_SAMPLES: Final = 3
"""Samples of which the fastest decides that a path is narrow. Measured: with a single sample, links of 50 Mbit/s fell
to two stripes after a first version that lost much at its start.
"""

# -- all rates but those of stripes

RATE_WINDOW_S: Final = 0.25
"""Least seconds over which a rate is measured. Derived: at 20 Mbit/s it holds 4.8 bursts of BURST_BYTES, so one burst
more or less is a fifth of the rate. A child that lags reports four times within the second of the design target.
"""

# -- pacing towards children (p2pcast.relay.pacing); section "Chains over long paths"

PACED_RTT_S: Final = 0.01
"""Round trip in seconds, without queues, from which children are paced. Measured on both sides. Below a millisecond,
versions to eight peers take 1.15 to 1.20 times the ideal without pacing, and 1.24 to 1.38 with it. At 30 ms, four hops
of 10 Mbit/s take 6.32 s without and 6.10 with it. No value between was measured.
"""
PACING_HEADROOM: Final = 1.25
"""Factor between the rate at which versions came in and the rate at which they are sent on: data that was held up has
to catch up. Measured at four hops of 20 Mbit/s and 150 ms, against no limit: 3.1 s instead of 4.1. Other factors were
not measured.
"""
INBOUND_ARTIFACTS: Final = 16
"""Artifacts whose inbound rate is remembered. Not measured."""
FAR_BEHIND_S: Final = 1.0
"""Seconds of inbound data. A child with more than that in line catches up, and is not paced. Not measured."""
UNPACED_BYTES_S: Final = 1 << 40
"""Bytes per second that no link carries. A connection reads it as no limit, and keeps its state."""

# -- bursts (p2pcast.relay.downstream)

BURST_BYTES: Final = 128 * limits.KIB
"""Bytes handed to one stripe in one write, or one larger piece: two pieces of 64 KiB. Measured at four hops and 300 ms:
bursts of 32 KiB, with buffers of 32 KiB a stripe, make no difference (7.79 against 7.83 s).
"""

# -- reminders behind the last piece (p2pcast.relay.child); section "Chains over long paths"

FAR_RTT_S: Final = 0.05
"""Round trip in seconds, without queues, from which a stripe gets an ALIVE behind its last piece. The value was not
measured. The reminder was: at 300 ms 7.3 s a version with it, 8.2 without.
"""
REMINDER_ROUND_TRIPS: Final = 2.0
"""Round trips after the last piece during which reminders are sent. Derived: after two, the kernel sends a tail loss
probe by itself (RFC 8985, section 7.2).
"""

# -- lag behind the parent (p2pcast.relay.child_lag)

LAG_WINDOW_ROUND_TRIPS: Final = 4
"""Least round trips of one inflow measurement. A loss holds up one or two of them. Measured at 300 ms: with 0.25 s
alone, the hub moved peers after a single loss, and versions took 9 to 13 s.
"""
CATCH_UP_S: Final = 0.3
"""Seconds to draw level with the parent, above which a child reports at once. Derived, as the least that no healthy hop
exceeds: at 10 Mbit/s, with a burst in flight on each of NARROW_STRIPES, a child is 0.21 s behind. The parent's count is
up to ALIVE_ACTIVE_S old, so 0.26 s.
"""
CATCH_UP_ROUND_TRIPS: Final = 1.2
"""The same limit in round trips; the longer one counts. Derived, as a lower bound: one round trip of data is
in flight on a healthy hop. The fifth above it was not measured.
"""

# -- pulling while a version is on its way (p2pcast.relay.pull_throttle); section "While others catch up"

PULL_SHARE: Final = 1 / 64
"""Share of the link for all pulling together, each way. Measured with two peers that pull: versions take -1.4 to +3.9 %
longer at 20 Mbit/s, +6.3 % at 100 Mbit/s on full processors. Other shares were not measured.
"""
PULL_FLOOR_BYTES_S: Final = 32 * limits.KIB
"""Bytes per second for all pulling together where the link's rate is unknown or very low. Derived:
PULL_LEAST_BYTES_S for each of the eight sources that the hub names (topology.pull_sources).
"""
PULL_LEAST_BYTES_S: Final = 4 * limits.KIB
"""Bytes per second for one link. Derived: 14 packets of 1448 bytes within PULL_STALL_S, of which even at 10 % loss one
comes. So silence of PULL_STALL_S still means a failure.
"""
THROUGHPUT_WINDOWS: Final = 1200
"""Windows remembered: five minutes of sending. Windows without traffic do not count, so a pause between versions makes
nothing forgotten. The value itself was not measured: a rate that is twice too high costs a version PULL_SHARE, 1.6 %.
"""
NEWS_S: Final = 0.2
"""Seconds between two HAVE messages to one child that pulls. Derived: a part of PULL_WINDOW_S, so that a source's work
outlasts the wait for its news.
"""
MAX_PULLS: Final = 16
"""Children that may pull from one node at a time; further ones have to find another source. Derived: a peer pulls from
six nodes at most (rollout_node.sync.downloader), so the mean over a fleet that pulls from itself is six. If sources are
chosen at random, more than 16 choose one node once in 5000 times.
"""

# -- pieces asked of sources (p2pcast.relay.pull_schedule)

PULL_WINDOW_S: Final = 1.0
"""Seconds of work asked of a source ahead. Derived: the work outlasts 0.8 s. That is a round trip (0.3 s on the longest
path), the age of the rate (RATE_WINDOW_S), the age of news (NEWS_S) and a round of decisions. At the end a window is
waited for at most.
"""
PULL_WINDOW_LEAST_PIECES: Final = 2
"""Pieces in a window, whatever the source's rate. Derived: one comes while the other is asked for."""
PULL_WINDOW_LEAST_BYTES: Final = 256 * limits.KIB
"""Bytes in a window, whatever the source's rate. Derived: 20 Mbit/s and 100 ms have 250 kB in flight."""
PULL_WINDOW_MOST_BYTES: Final = 32 * limits.MIB
"""Bytes in a window, whatever the source's rate. Derived: as much may wait for the disk (p2pcast.store.write_behind);
a source that is lost has kept no more than that from the others.
"""
PULL_LATE_S: Final = 1.0
"""A source that needs more seconds than this, and twice as many as an idle source, is asked to give pieces back.
Derived: giving back and asking again take two round trips, 0.6 s on the longest measured path.
"""
PULL_STALL_S: Final = 5.0
"""Seconds without a byte after which a source is left. Derived: TCP sends a lost packet again after 1 and 3 s (RFC
6298), so two losses in a row are no failure. A source that gives way to a version sends PULL_LEAST_BYTES_S.
"""

# -- silence of a parent or a child (p2pcast.relay.parent_watch, upstream, downstream); section "Faults"

ALIVE_ACTIVE_S: Final = 0.05
"""Seconds between keepalives while a transfer runs. Derived: a fifth of SILENCE_FLOOR_S, so that four keepalives in a
row may be late.
"""
ALIVE_IDLE_S: Final = 1.0
"""Seconds between keepalives at other times. Derived: a fifth of IDLE_SILENCE_S."""
SILENCE_FLOOR_S: Final = 0.25
"""Seconds of silence, while a transfer runs, that may be a pause of the parent's scheduler. Measured with the design
target of a second without bytes: 0.35 s after a cut link and 0.85 s below a frozen parent, at a load of 10 to 18.
"""
IDLE_SILENCE_S: Final = 5.0
"""Seconds of silence at other times after which a parent counts as failed, and that it has for an answer. Derived: no
version waits, so the limit is that of the hub for a silent peer (trainer_node.hub).
"""
STALL_FLOOR_S: Final = 1.0
"""Seconds without payload after which a parent that holds more pieces counts as stalled: the design target. Derived, as
a lower bound: a piece takes 0.05 s at 10 Mbit/s.
"""
JITTER_FACTOR: Final = 4.0
"""Factor between the longest recent gap of this link and the silence that counts as failure. Derived: gaps count up to
SILENCE_FLOOR_S, so that a link's limit is a second at most, the design target.
"""
JITTER_DECAY: Final = 0.98
"""Factor on the longest gap for each read. Derived: with keepalives alone a gap counts half after 1.7 s and 2 % after
10 s.
"""
BLOCKED_LOOP_S: Final = 0.1
"""Seconds of delay of ``judge`` from which this node's own event loop was blocked. The blocked time does not count as
silence. Derived: two rounds of ALIVE_ACTIVE_S.
"""
CHILD_SILENCE_S: Final = 15.0
"""Seconds of silence after which a child's link is closed. Derived: the hub replaces a silent peer after a third of it.
"""
EXPECTED_S: Final = 2.0
"""Seconds that a live parent may take to open an announced version: it may wait for its own parent. After that the link
counts as idle again. Derived: OPEN passes eight hops with round trips of 300 ms in 1.2 s.
"""

# -- memory for children (p2pcast.relay.node, p2pcast.relay.read_ahead)

CACHE_BYTES: Final = 16 * limits.MIB
"""Bytes of the newest pieces, kept in memory for children. Older pieces are read from the store. Derived: 1.3 s of data
at 100 Mbit/s, so a child within FAR_BEHIND_S needs no disk there.
"""
READ_AHEAD_PIECES: Final = 32
"""Pieces read ahead at once for one child. Derived: 0.8 s of a delta's pieces at 20 Mbit/s."""
READ_AHEAD_BYTES: Final = 4 * limits.MIB
"""Bytes read ahead at once for one child: an anchor's pieces are large. Derived: a quarter of CACHE_BYTES, so that four
children may lag at different places.
"""

# -- the path to the newest version (p2pcast.relay.artifact_path)

CATCH_UP_STEP_S: Final = 0.05
"""Seconds per artifact in addition to its transfer and decoding: requesting it, and advancing the shadow. Derived: a
round of the downloader's decisions. Longer round trips are left out, as artifacts are requested concurrently.
"""
SQUASH_LEAST_GAIN_S: Final = 0.5
"""Seconds that a squash has to save before a peer asks the hub for one. Derived, as a lower bound: asking takes a round
trip (0.3 s on the longest measured path) and a round of decisions (0.05 s).
"""
