"""Defences against well-framed messages of nodes with a certificate."""

from __future__ import annotations

from mutation import Mutation

ONE_MESSAGE = "ending a daemon with one message"
NONSENSE = "sending nonsense about itself to planning"
STANDS_FOR = "posing as a missing worker"
HOLDS_ON = "making a child wait for hours"
ENDLESS = "endless requests"
UNREAD = "requests without reading the answers"
SILENT = "links that never state their purpose"
PLACES = "using up shared capacity"
NAMES = "endless names"
DESCRIPTORS = "all descriptors"

INPUTS_TESTS = "tests/daemons/hub/test_inputs.py::"
RATIONS = "tests/p2pcast/transport/test_rate_limit.py::"
DIALLING = "tests/rollout_node/sync/test_connector.py::"
LINK, LISTEN = "p2pcast/transport/link.py", "p2pcast/transport/listener.py"

INPUTS = [
    Mutation(
        ONE_MESSAGE,
        "p2pcast/wire/constraints.py",
        "type(x) is str and is_host(x)",
        "type(x) is str",
        INPUTS_TESTS + "test_one_join_does_not_kill_the_hub",
    ),
    Mutation(
        ONE_MESSAGE,
        "p2pcast/ground/addresses.py",
        'return "%" not in text',
        "return True",
        "tests/p2pcast/ground/test_addresses.py::test_hosts_that_may_not",
    ),
    Mutation(
        ONE_MESSAGE,
        "p2pcast/transport/dial.py",
        "    except Exception as error:  # noqa: BLE001 - one peer's address must not end a daemon",
        "    except OSError as error:",
        "tests/p2pcast/transport/test_dial_any.py::test_an_address_that_no_event_loop_accepts_is_unreachable",
    ),
    Mutation(
        ONE_MESSAGE,
        "p2pcast/transport/dial.py",
        "    except Exception as error:  # noqa: BLE001 - as in _dial_stripe",
        "    except OSError as error:",
        "tests/p2pcast/transport/test_dial_any.py::test_an_address_that_no_event_loop_accepts_is_unreachable",
    ),
    Mutation(
        ONE_MESSAGE,
        "trainer_node/membership/reachability_prober.py",
        "            except Exception as error:  # noqa: BLE001 - one peer's address must not stop the hub",
        "            except OSError as error:",
        "tests/trainer_node/membership/test_reachability_prober.py::test_an_error_of_a_dial_ends_no_other_dial",
    ),
    Mutation(
        ONE_MESSAGE,
        LINK,
        "        except Exception as error:  # noqa: BLE001 - reported",
        "        except ZeroDivisionError as error:",
        RATIONS + "test_an_owners_unexpected_error_ends_one_link",
    ),
    Mutation(
        ONE_MESSAGE,
        "trainer_node/hub.py",
        "            except Exception as error:  # noqa: BLE001 - what peers report must not stop the hub",
        "            except ZeroDivisionError as error:",
        INPUTS_TESTS + "test_planning_that_fails_does_not_end_the_hub",
    ),
    Mutation(
        ONE_MESSAGE,
        "trainer_node/ranks/rank_intake.py",
        "            except Exception as error:  # noqa: BLE001 - what ranks send must not stop the hub",
        "            except ZeroDivisionError as error:",
        "tests/daemons/intake/test_undone.py::test_an_unexpected_error_undoes_a_version_and_not_the_hub",
    ),
    Mutation(
        ONE_MESSAGE,
        "rollout_node/control/hub_session.py",
        "        except RemoteError as error:\n            # Engines",
        "        except ZeroDivisionError as error:\n            # Engines",
        INPUTS_TESTS + "test_a_report_that_is_too_long_does_not_end_its_peer",
    ),
    Mutation(
        NONSENSE,
        "p2pcast/wire/connection.py",
        "events.append(Message(kind, record, handle, invalid_keys=invalid_keys, size=len(body)))",
        "events.append(Message(kind, record, handle, size=len(body)))",
        INPUTS_TESTS + "test_a_report_that_makes_no_sense_is_left_out",
    ),
    Mutation(
        NONSENSE,
        "p2pcast/wire/records.py",
        "                whole = bool(values[key] == body[key])\n            except InvalidError:",
        "                whole = bool(values[key] == body[key])\n            except ZeroDivisionError:",
        "tests/p2pcast/wire/test_lenient_report.py::test_an_invalid_value_is_dropped_and_named",
    ),
    Mutation(
        NONSENSE,
        "p2pcast/cli/status_document.py",
        "    except OverflowError:",
        "    except ZeroDivisionError:",
        "tests/p2pcast/cli/test_status.py::test_integers_beyond_any_float_are_shown",
    ),
    Mutation(
        NONSENSE,
        "p2pcast/ground/plain_text.py",
        "c if c.isprintable() else",
        "c if True else",
        "tests/p2pcast/cli/test_status.py::test_names_cannot_control_the_terminal",
    ),
    Mutation(
        NONSENSE,
        "trainer_node/membership/fleet_timeline.py",
        "row.name in seen.named or len(seen.named) < limits.MAX_PEER_ENGINES",
        "True",
        "tests/trainer_node/membership/test_fleet_timeline.py::test_a_peer_that_names_engines_without_end_gets_no_more_rows",
    ),
    Mutation(
        STANDS_FOR,
        "rollout_node/installers/install_socket.py",
        "        if rank >= self._ranks:",
        "        if False:",
        "tests/rollout_node/engine/multi_host/test_reports.py::test_a_rank_that_the_engine_does_not_have_counts_for_none",
    ),
    Mutation(
        STANDS_FOR,
        "rollout_node/installers/install_socket.py",
        "        if others - {ranks}:",
        "        if False:",
        "tests/rollout_node/engine/multi_host/test_reports.py::test_a_rank_that_the_engine_does_not_have_counts_for_none",
    ),
    Mutation(
        HOLDS_ON,
        "p2pcast/relay/upstream.py",
        "        if body.t in self._pinged:\n            self._pinged.remove(body.t)",
        "        if True:",
        "tests/p2pcast/relay/test_upstream.py::test_a_pong_without_a_ping_does_not_set_the_round_trip",
    ),
    Mutation(
        ENDLESS,
        LINK,
        'self.pause_reading("rate limit")',
        "pass",
        RATIONS + "test_a_node_over_its_rate_limit_waits_and_others_do_not",
    ),
    Mutation(
        ENDLESS,
        LISTEN,
        "self._rate_limits.of(node, asyncio",
        "RateLimits().of(node, asyncio",
        RATIONS + "test_all_links_of_a_node_share_one_rate_limit",
    ),
    Mutation(
        ENDLESS,
        "p2pcast/transport/rate_limit.py",
        "    Type.FIND_SOURCES: 20.0,\n",
        "",
        RATIONS + "test_every_request_has_a_cost",
    ),
    Mutation(
        UNREAD,
        LINK,
        "if self._unread_bytes > limits.MAX_UNREAD_BYTES:",
        "if False:",
        RATIONS + "test_a_link_that_does_not_read_its_answers_is_aborted",
    ),
    Mutation(
        UNREAD,
        "p2pcast/transport/stripe.py",
        "            if self._transport.get_write_buffer_size():",
        "            if False:",
        RATIONS + "test_closing_a_link_that_does_not_read_ends",
    ),
    Mutation(
        SILENT,
        "trainer_node/admission/hub_links.py",
        '            link.expect_first_message("JOIN")\n',
        "",
        INPUTS_TESTS + "test_a_link_that_says_nothing_ends",
    ),
    Mutation(
        SILENT,
        "trainer_node/ranks/rank_session.py",
        '        link.expect_first_message("RANK")\n',
        "",
        INPUTS_TESTS + "test_a_link_that_says_nothing_ends",
    ),
    Mutation(
        SILENT,
        "p2pcast/relay/downstream.py",
        '        link.expect_first_message("ATTACH")\n',
        "",
        INPUTS_TESTS + "test_a_link_to_a_peer_that_says_nothing_ends",
    ),
    Mutation(
        SILENT,
        "rollout_node/engine/multi_host_leader.py",
        '        link.expect_first_message("MEMBER")\n',
        "",
        "tests/rollout_node/engine/multi_host/test_joining.py::test_a_connection_without_a_member_message_is_closed",
    ),
    Mutation(
        SILENT,
        "rollout_node/sync/connector.py",
        '        link.expect_first_message("other stripes", DIAL_S)\n',
        "",
        DIALLING + "test_a_parent_that_brings_some_of_its_stripes_is_not_waited_for",
    ),
    Mutation(
        PLACES,
        LISTEN,
        "while len(others) >= limits.MAX_LINKS_PER_NODE:",
        "while False:",
        RATIONS + "test_the_oldest_link_of_a_node_gives_way",
    ),
    Mutation(
        PLACES,
        LISTEN,
        "        oldest = own[0]\n",
        "        oldest = next(iter(stripes))\n",
        RATIONS + "test_orphan_stripes_of_a_node_abort_that_nodes_oldest",
    ),
    Mutation(
        PLACES,
        "p2pcast/relay/downstream.py",
        "len(pulls) >= self._max_pulls or own >= limits.MAX_PULLS_PER_NODE",
        "len(pulls) >= self._max_pulls",
        "tests/p2pcast/relay/test_asking.py::test_one_node_cannot_take_all_places_for_pulling",
    ),
    Mutation(
        PLACES,
        "rollout_node/sync/connector.py",
        " and running.count(name) < MAX_CALLS_PER_NODE",
        "",
        DIALLING + "test_one_node_keeps_only_so_many_calls_under_way",
    ),
    Mutation(
        PLACES,
        "trainer_node/background/anchors_and_squashes.py",
        "if node and list(self._askers.values()).count(node) >= limits.MAX_SQUASHES_PER_NODE:",
        "if False:",
        INPUTS_TESTS + "test_one_peer_has_only_so_many_squashes_made",
    ),
    Mutation(
        PLACES,
        "trainer_node/membership/peer_session.py",
        "        if self._renewing:",
        "        if False:",
        INPUTS_TESTS + "test_one_renewal_at_a_time",
    ),
    Mutation(
        NAMES,
        "topology/pull_sources.py",
        "            if len(mine) >= MOST_HELD and artifact not in mine:",
        "            if False:",
        "tests/topology/test_pull_sources.py::test_records_of_one_peer_are_bounded",
    ),
    Mutation(
        NAMES,
        "topology/pull_sources.py",
        "        if len(sought) > MOST_SOUGHT:",
        "        if False:",
        "tests/topology/test_pull_sources.py::test_records_of_one_peer_are_bounded",
    ),
    Mutation(
        NAMES,
        "topology/reachability.py",
        "        if until > now:",
        "        if False:",
        "tests/topology/test_reachability.py::test_a_repeated_failure_is_not_recorded",
    ),
    Mutation(
        NAMES,
        "trainer_node/membership/reachability_prober.py",
        "            self._due[ident] = addresses\n",
        "            self._due[ident] = [*self._due.get(ident, []), *addresses]\n",
        "tests/trainer_node/membership/test_reachability_prober.py::test_replaced_addresses_of_a_peer_are_not_dialled",
    ),
    Mutation(
        DESCRIPTORS,
        "rollout_node/installers/install_socket.py",
        "            loop.remove_reader(listener)\n",
        "",
        "tests/rollout_node/installers/test_install_socket.py::test_without_descriptors_a_listener_waits_and_continues",
    ),
]
