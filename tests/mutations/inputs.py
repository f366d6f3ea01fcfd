"""Defences against well-framed messages of those who have a certificate."""

from __future__ import annotations

from mutation import Mutation

ONE_MESSAGE = "to end a daemon with one message"
NONSENSE = "to have nonsense about itself planned by"
STANDS_FOR = "to stand for a worker that is missing"
HOLDS_ON = "to have a child wait for it for hours"
ENDLESS = "asking without end"
UNREAD = "asking and not reading"
SILENT = "links that never say what they are for"
PLACES = "taking the places of all others"
NAMES = "names without end"
DESCRIPTORS = "all descriptors"

INPUTS_TESTS = "tests/daemons/test_inputs.py::"
RATIONS = "tests/p2pcast/transport/test_rations.py::"
DIALLING = "tests/rollout_node/test_dialling.py::"
LINK, LISTEN = "p2pcast/transport/link.py", "p2pcast/transport/listener.py"

INPUTS = [
    Mutation(
        ONE_MESSAGE,
        "p2pcast/wire/messages.py",
        "type(x) is str and is_host(x)",
        "type(x) is str",
        INPUTS_TESTS + "test_one_join_does_not_kill_the_hub",
    ),
    Mutation(
        ONE_MESSAGE,
        "p2pcast/addresses.py",
        'return "%" not in text',
        "return True",
        "tests/p2pcast/test_addresses.py::test_hosts_that_may_not",
    ),
    Mutation(
        ONE_MESSAGE,
        "p2pcast/transport/dial.py",
        "    except Exception as error:  # noqa: BLE001 - one peer's address must not end a daemon",
        "    except OSError as error:",
        "tests/p2pcast/transport/test_dial_any.py::test_an_address_that_no_loop_takes_is_out_of_reach",
    ),
    Mutation(
        ONE_MESSAGE,
        "p2pcast/transport/dial.py",
        "    except Exception as error:  # noqa: BLE001 - as in _dial_stripe",
        "    except OSError as error:",
        "tests/p2pcast/transport/test_dial_any.py::test_an_address_that_no_loop_takes_is_out_of_reach",
    ),
    Mutation(
        ONE_MESSAGE,
        "trainer_node/lookout.py",
        "            except Exception as error:  # noqa: BLE001 - one peer's address must not end the hub",
        "            except OSError as error:",
        "tests/trainer_node/test_lookout.py::test_what_an_address_does_to_a_dial_ends_nothing",
    ),
    Mutation(
        ONE_MESSAGE,
        LINK,
        """                self.owner.on_link_event(self, stripe, event)
            except Exception as error:  # noqa: BLE001 - told by _fault
                self._fault(error)""",
        """                self.owner.on_link_event(self, stripe, event)
            except ZeroDivisionError as error:
                self._fault(error)""",
        RATIONS + "test_what_an_owner_did_not_expect_ends_one_link",
    ),
    Mutation(
        ONE_MESSAGE,
        "trainer_node/hub.py",
        "            except Exception as error:  # noqa: BLE001 - what peers report must not end the hub",
        "            except ZeroDivisionError as error:",
        INPUTS_TESTS + "test_planning_that_fails_does_not_end_the_hub",
    ),
    Mutation(
        ONE_MESSAGE,
        "trainer_node/intake_session.py",
        "            except Exception as error:  # noqa: BLE001 - what ranks send must not end the hub",
        "            except ZeroDivisionError as error:",
        "tests/daemons/intake/test_undone.py::test_an_error_that_nobody_expected_undoes_a_version_and_not_the_hub",
    ),
    Mutation(
        ONE_MESSAGE,
        "rollout_node/control.py",
        "        except RemoteError as error:\n            # Engines",
        "        except ZeroDivisionError as error:\n            # Engines",
        INPUTS_TESTS + "test_a_report_that_is_too_long_does_not_end_its_peer",
    ),
    Mutation(
        NONSENSE,
        "p2pcast/wire/connection.py",
        "odd = lenient.prune(kind, content)",
        "odd = ()",
        INPUTS_TESTS + "test_a_report_that_makes_no_sense_is_left_out",
    ),
    Mutation(
        NONSENSE,
        "p2pcast/wire/lenient.py",
        "    return lambda x: x if check(x) else NOTHING",
        "    return lambda x: x",
        "tests/p2pcast/wire/test_lenient.py::test_a_value_that_makes_no_sense_is_left_out_and_named",
    ),
    Mutation(
        NONSENSE,
        "p2pcast/cli/status.py",
        "    except OverflowError:",
        "    except ZeroDivisionError:",
        "tests/p2pcast/cli/test_status.py::test_whatever_the_answer_it_is_shown",
    ),
    Mutation(
        NONSENSE,
        "p2pcast/cli/status.py",
        "c if c.isprintable() else",
        "c if True else",
        "tests/p2pcast/cli/test_status.py::test_names_are_shown_as_they_are_and_move_nothing",
    ),
    Mutation(
        NONSENSE,
        "trainer_node/fleet.py",
        "row.name in seen.named or len(seen.named) < limits.MAX_PEER_ENGINES",
        "True",
        "tests/trainer_node/test_fleet.py::test_a_peer_that_names_engines_without_end_gets_no_more_rows",
    ),
    Mutation(
        STANDS_FOR,
        "rollout_node/install_socket.py",
        "        if rank >= self._ranks:",
        "        if False:",
        "tests/rollout_node/companions/test_reports.py::test_a_rank_that_the_engine_does_not_have_counts_for_none",
    ),
    Mutation(
        STANDS_FOR,
        "rollout_node/install_socket.py",
        "        if others - {ranks}:",
        "        if False:",
        "tests/rollout_node/companions/test_reports.py::test_a_rank_that_the_engine_does_not_have_counts_for_none",
    ),
    Mutation(
        HOLDS_ON,
        "p2pcast/relay/upstream.py",
        '            if body["t"] in self._pinged:\n                self._pinged.remove(body["t"])',
        "            if True:",
        "tests/p2pcast/relay/test_upstream.py::test_an_answer_to_no_ping_says_nothing_of_the_way",
    ),
    Mutation(
        ENDLESS, LINK, 'self.pause_reading("ration")', "pass", RATIONS + "test_one_that_asks_without_end_waits_and_others_do_not"
    ),
    Mutation(
        ENDLESS,
        LISTEN,
        "self._rations.of(node, asyncio",
        "Rations().of(node, asyncio",
        RATIONS + "test_all_links_of_a_node_have_one_ration",
    ),
    Mutation(
        ENDLESS,
        "p2pcast/transport/ration.py",
        "    Type.SEEK: 20.0,\n",
        "",
        RATIONS + "test_whatever_a_node_may_ask_has_its_cost",
    ),
    Mutation(
        UNREAD,
        LINK,
        "if self._unread_bytes > limits.MAX_UNREAD_BYTES:",
        "if False:",
        RATIONS + "test_one_that_does_not_read_its_answers_is_left",
    ),
    Mutation(
        UNREAD,
        "p2pcast/transport/stripe.py",
        "            if self._transport.get_write_buffer_size():",
        "            if False:",
        RATIONS + "test_one_that_does_not_read_is_not_closed_for_ever",
    ),
    Mutation(
        SILENT,
        "trainer_node/hub.py",
        '            link.await_first_word("JOIN")\n',
        "",
        INPUTS_TESTS + "test_a_link_that_says_nothing_ends",
    ),
    Mutation(
        SILENT,
        "trainer_node/rank_session.py",
        '        link.await_first_word("RANK")\n',
        "",
        INPUTS_TESTS + "test_a_link_that_says_nothing_ends",
    ),
    Mutation(
        SILENT,
        "p2pcast/relay/downstream.py",
        '        link.await_first_word("ATTACH")\n',
        "",
        INPUTS_TESTS + "test_a_link_to_a_peer_that_says_nothing_ends",
    ),
    Mutation(
        SILENT,
        "rollout_node/companions.py",
        '        link.await_first_word("MEMBER")\n',
        "",
        "tests/rollout_node/companions/test_knocking.py::test_one_that_does_not_say_what_it_is_goes",
    ),
    Mutation(
        SILENT,
        "rollout_node/dialling.py",
        '        link.await_first_word("other stripes", DIAL_S)\n',
        "",
        DIALLING + "test_a_parent_that_brings_some_of_its_stripes_is_not_waited_for",
    ),
    Mutation(
        PLACES,
        LISTEN,
        "while len(others) >= limits.MAX_LINKS_OF_NODE:",
        "while False:",
        RATIONS + "test_the_oldest_link_of_a_node_gives_way",
    ),
    Mutation(
        PLACES,
        LISTEN,
        "own[0] if len(own) >= limits.MAX_STRIPES else ",
        "",
        RATIONS + "test_stripes_without_their_link_push_out_their_own_nodes",
    ),
    Mutation(
        PLACES,
        "p2pcast/relay/downstream.py",
        "len(pulls) >= self._max_pulls or own >= limits.MAX_PULLS_OF_NODE",
        "len(pulls) >= self._max_pulls",
        "tests/p2pcast/relay/test_asking.py::test_one_node_does_not_take_all_the_places_of_those_who_pull",
    ),
    Mutation(
        PLACES,
        "rollout_node/dialling.py",
        " and running.count(name) < MAX_CALLS_OF_NODE",
        "",
        DIALLING + "test_one_node_keeps_only_so_many_calls_under_way",
    ),
    Mutation(
        PLACES,
        "trainer_node/keeping.py",
        "if node and list(self._askers.values()).count(node) >= limits.MAX_SQUASHES_OF_NODE:",
        "if False:",
        INPUTS_TESTS + "test_one_peer_has_only_so_many_squashes_made",
    ),
    Mutation(
        PLACES,
        "trainer_node/session.py",
        "            if self._renewing:",
        "            if False:",
        INPUTS_TESTS + "test_one_renewal_at_a_time",
    ),
    Mutation(
        NAMES,
        "topology/sources.py",
        "            if len(mine) >= MOST_HELD and artifact not in mine:",
        "            if False:",
        "tests/topology/test_sources.py::test_what_one_peer_says_and_seeks_is_bounded",
    ),
    Mutation(
        NAMES,
        "topology/sources.py",
        "        if len(sought) > MOST_SOUGHT:",
        "        if False:",
        "tests/topology/test_sources.py::test_what_one_peer_says_and_seeks_is_bounded",
    ),
    Mutation(
        NAMES,
        "topology/reach.py",
        "        if until > now:",
        "        if False:",
        "tests/topology/test_reach.py::test_what_is_said_again_is_no_news",
    ),
    Mutation(
        NAMES,
        "trainer_node/lookout.py",
        "            self._due[ident] = addresses\n",
        "            self._due[ident] = [*self._due.get(ident, []), *addresses]\n",
        "tests/trainer_node/test_lookout.py::test_addresses_of_which_a_peer_says_others_by_now_are_not_dialled",
    ),
    Mutation(
        DESCRIPTORS,
        "rollout_node/install_socket.py",
        "            loop.remove_reader(listener)\n",
        "",
        "tests/rollout_node/test_install_socket.py::test_without_descriptors_it_waits_and_goes_on",
    ),
]
