"""Constants that set the relay's pace, each with its unit, its reason and the measurement that chose it.

"Not measured" means that no run compared the value with another. The sections named are in docs/notes/measurements.md.
"""

from __future__ import annotations

from typing import Final

from p2pcast import limits

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
"""Factor by which one measured rate has to exceed the narrow limits before more stripes are used. Not measured."""
HELD_BACK_SHARE: Final = 0.5
"""Share of busy time, limited by a window, from which the stripes in use are doubled. The value was not measured. The
rule was: with buffers of 64 KiB, at 50 Mbit/s and 150 ms, it raises 8 Mbit/s (four stripes) to 14 to 16 (eight).
"""
RATE_SAMPLE_S: Final = 1.0
"""Least seconds of one rate sample. Not measured."""
RATE_SAMPLE_ROUND_TRIPS: Final = 8
"""Least round trips of one rate sample: the first samples fall into slow start. Not measured."""
RATE_SAMPLES: Final = 3
"""Samples of which the fastest decides that a path is narrow. Measured: with a single sample, links of 50 Mbit/s fell
to two stripes after a first version that lost much at its start.
"""

# -- pacing towards children (p2pcast.relay.pacing); section "Chains over long paths"

PACING_HEADROOM: Final = 1.25
"""Factor between the rate at which versions came in and the rate at which they are sent on: data that was held up has
to catch up. Measured at four hops of 20 Mbit/s and 150 ms, against no limit: 3.1 s instead of 4.1. Other factors were
not measured.
"""
INBOUND_SHORTEST_S: Final = 0.25
"""Seconds below which a transfer says more about round trips than about rates. Not measured."""
INBOUND_ARTIFACTS: Final = 16
"""Artifacts whose inbound rate is remembered. Not measured."""
FAR_BEHIND_S: Final = 1.0
"""Seconds of inbound data. A child with more than that in line catches up, and is not paced. Not measured."""
UNPACED_BYTES_S: Final = 1 << 40
"""Bytes per second that no link carries. A connection reads it as no limit, and keeps its state."""

# -- bursts (p2pcast.relay.downstream)

BURST_BYTES: Final = 128 * limits.KIB
"""Bytes handed to one stripe in one write: two of a delta's largest pieces. Measured at four hops and 300 ms: bursts of
32 KiB, with buffers of 32 KiB a stripe, make no difference (7.79 against 7.83 s).
"""

# -- reminders behind the last piece (p2pcast.relay.child); section "Chains over long paths"

FAR_RTT_S: Final = 0.05
"""Round trip in seconds from which a stripe gets an ALIVE behind its last piece. The value was not measured. The
reminder was: at 300 ms 7.3 s a version with it, 8.2 without.
"""
REMINDER_ROUND_TRIPS: Final = 2.0
"""Round trips after the last piece during which reminders are sent. After two, the kernel probes by itself. Not
measured.
"""

# -- lag behind the parent (p2pcast.relay.child_lag)

LAG_WINDOW_S: Final = 0.25
"""Least seconds of one inflow measurement: less shows bursts. Not measured."""
LAG_WINDOW_ROUND_TRIPS: Final = 4
"""Least round trips of one inflow measurement. A loss holds up one or two of them. Measured at 300 ms: with 0.25 s
alone, the hub moved peers after a single loss, and versions took 9 to 13 s.
"""
CATCH_UP_S: Final = 0.3
"""Seconds to draw level with the parent, above which a child reports at once. Not measured."""
CATCH_UP_ROUND_TRIPS: Final = 1.2
"""The same limit in round trips; the longer one counts. One round trip of data is in flight on an ordinary hop. Not
measured by itself.
"""

# -- pulling while a version is on its way (p2pcast.relay.pull_throttle); section "While others catch up"

PULL_SHARE: Final = 1 / 64
"""Share of the link for all pulling together, each way. Measured with two peers that pull: versions take -1.4 to +3.9 %
longer at 20 Mbit/s, +6.3 % at 100 Mbit/s on full processors. Other shares were not measured.
"""
PULL_FLOOR_BYTES_S: Final = 32 * limits.KIB
"""Bytes per second for all pulling together where the link's rate is unknown or very low. Not measured."""
PULL_LEAST_BYTES_S: Final = 4 * limits.KIB
"""Bytes per second for one link: several packets a second, so that silence still means a failure. Not measured."""
THROUGHPUT_WINDOW_S: Final = 0.25
"""Least seconds between two samples of a link's throughput and of its stripes. Not measured."""
THROUGHPUT_WINDOWS: Final = 1200
"""Windows remembered: five minutes of sending. Not measured."""
NEWS_S: Final = 0.2
"""Seconds between two HAVE messages to one child that pulls. Not measured."""
