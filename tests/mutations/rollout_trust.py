"""Certificates, tokens and callers of the rollout plane."""

from __future__ import annotations

from mutation import CONTEXTS, TOKEN_LEDGER, Mutation

SERVER_ROLE = "p2pcast/trust/server_role.py"
SERVERS = "tests/p2pcast/trust/test_server_role.py::"
CALLER = "p2pcast/daemon/http_caller.py"
CALLERS = "tests/p2pcast/daemon/test_http_caller.py::"
NODE = "p2pcast/transport/node_certificate.py"
NODES = "tests/daemons/trust/test_node_certificates.py::"
REQUESTS = "tests/daemons/rollouts/test_ledger_requests.py::"

ROLLOUT_TRUST = [
    Mutation(
        "reads a worker's bearer on its way to the ledger",
        "rollout_node/commands/work_command.py",
        'if parts.scheme == "http" and not (',
        "if False and not (",
        "tests/rollout_node/commands/test_work_command.py::test_a_bearer_does_not_leave_the_machine_in_plain_text",
    ),
    Mutation(
        "answers in the ledger's place, with its own valid certificate",
        SERVER_ROLE,
        "if found.role != context.role:",
        "if False:",
        SERVERS + "test_a_server_of_another_role_receives_no_byte",
    ),
    Mutation(
        "answers in the ledger's place, with its own valid certificate",
        SERVER_ROLE,
        "sslsocket_class = _CheckedSocket",
        "sslsocket_class = ssl.SSLSocket",
        SERVERS + "test_a_blocking_client_is_checked_too",
    ),
    Mutation(
        "answers in the ledger's place, with its own valid certificate",
        "p2pcast/trust/certificate_authority.py",
        "[ExtendedKeyUsageOID.SERVER_AUTH] if who.role in SERVERS else []",
        "[ExtendedKeyUsageOID.SERVER_AUTH]",
        SERVERS + "test_a_clients_certificate_is_no_servers",
    ),
    Mutation(
        "answers in the ledger's place, with its own valid certificate",
        SERVER_ROLE,
        "if found.run != context.run:",
        "if False:",
        SERVERS + "test_a_ledger_of_another_run_receives_no_byte",
    ),
    Mutation(
        "answers in the ledger's place, so that workers give up",
        "rollout_node/worker/ledger_client.py",
        "if self._answered and isinstance(found, RefusedError) else found",
        "if False else found",
        "tests/rollout_node/worker/test_ledger_over_tls.py::test_a_later_impostor_ends_no_worker",
    ),
    Mutation(
        "keeps workers from the hub",
        NODE,
        "            except P2PCastError as error:\n                self._warn",
        "            except UsageError as error:\n                self._warn",
        NODES + "test_a_hub_that_is_away_ends_no_worker",
    ),
    Mutation(
        "keeps workers from the hub",
        NODE,
        "            except P2PCastError as error:\n                self._warn",
        "            except RetryableError as error:\n                self._warn",
        NODES + "test_a_hub_that_refuses_ends_no_worker_with_a_valid_certificate",
    ),
    Mutation(
        "keeps workers from the hub",
        "p2pcast/trust/key_files.py",
        "        write_pem(path, new_key(), [])",
        "        return new_key()",
        NODES + "test_a_lost_answer_costs_no_identity",
    ),
    Mutation(
        "keeps workers from the hub",
        "rollout_node/control/peer_certificate.py",
        "key = self._kept.key or await self._blocking(kept_key, self._kept.path.with_name(KEY))",
        'key = self._kept.key or __import__("p2pcast.trust.certificates", fromlist=["x"]).new_key()',
        "tests/daemons/trust/test_trust.py::"
        "test_a_peer_whose_first_answer_is_lost_joins_with_its_key_and_one_admission",
    ),
    Mutation(
        "sends requests to a ledger without a certificate",
        CONTEXTS,
        "ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED",
        "ssl.CERT_OPTIONAL",
        CALLERS + "test_a_client_without_a_certificate_sends_no_request",
    ),
    Mutation(
        "sends requests to a ledger without a certificate",
        CONTEXTS,
        "context.verify_mode = verify",
        "context.verify_mode = verify\n    context.verify_flags |= 0x200000  # X509_V_FLAG_NO_CHECK_TIME",
        CALLERS + "test_an_expired_certificate_sends_no_request",
    ),
    Mutation(
        "sends requests to a ledger without a certificate",
        CONTEXTS,
        "context.verify_mode = verify",
        "context.verify_mode = ssl.CERT_NONE",
        CALLERS + "test_a_certificate_of_another_authority_sends_no_request",
    ),
    Mutation(
        "sends requests to a ledger without a certificate",
        CALLER,
        "if holder.run != run:",
        "if False:",
        CALLERS + "test_a_caller_of_another_run_is_refused",
    ),
    Mutation(
        "keeps a connection to the ledger open",
        "trainer_node/ledger_server/api_server.py",
        "self._callers.of_role(REQUEST.get(), role)",
        "pass",
        "tests/trainer_node/ledger_server/test_api_server.py::"
        "test_nothing_is_done_for_a_caller_that_was_evicted_before_its_body_came",
    ),
    Mutation(
        "keeps a connection to the ledger open",
        "trainer_node/ledger_server/worker_routes.py",
        "server.check_role(workers.LEASE.role)",
        "pass",
        "tests/daemons/rollouts/test_ledger_certificates.py::"
        "test_an_evicted_worker_is_refused_on_its_open_connection_and_gets_no_leases",
    ),
    Mutation(
        "keeps a connection to the ledger open",
        CALLER,
        "if holder.node in evicted:",
        "if False:",
        CALLERS + "test_an_eviction_counts_on_open_connections",
    ),
    Mutation(
        "keeps a connection to the ledger open",
        CALLER,
        "if time.time() >= until:",
        "if False:",
        CALLERS + "test_a_certificate_that_expires_on_an_open_connection_ends_the_connection",
    ),
    Mutation(
        "poses as the ledger with a workers' token",
        TOKEN_LEDGER,
        "if role != found.role and not (found.own and local):",
        "if False:",
        NODES + "test_a_token_of_another_role_gives_no_certificate",
    ),
    Mutation(
        "shows a certificate that is not its own",
        NODE,
        "found if found.who == self.who and fingerprint(found.authority) == self._authority else None",
        "found",
        NODES + "test_a_certificate_of_another_run_in_the_folder_is_not_used",
    ),
    Mutation(
        "opens connections until no other worker",
        "trainer_node/ledger_server/callers.py",
        "if len(mine) >= self._most:",
        "if False:",
        "tests/trainer_node/ledger_server/test_callers.py::test_further_connections_are_refused_until_one_is_closed",
    ),
    Mutation(
        "takes batches, adds groups",
        "trainer_node/ledger_server/callers.py",
        "if caller is None or caller.role != role:",
        "if caller is None:",
        REQUESTS + "test_a_role_sends_its_own_requests_alone",
    ),
    Mutation(
        "takes batches",
        "trainer_node/ledger_server/callers.py",
        "if caller is None or caller.role != role:",
        "if caller is None:",
        "tests/daemons/rollouts/test_audits.py::test_a_worker_reads_no_results_by_auditing",
    ),
    Mutation(
        "sends scores of the probe set that are no log-probabilities",
        "p2pcast/rollouts/probe_set.py",
        "if not np.isfinite(found).all() or (found > MAX_SCORE).any():",
        "if False:",
        "tests/daemons/rollouts/test_probes.py::test_malformed_scores_and_unknown_versions_are_refused",
    ),
    Mutation(
        "fills the ledger's memory with scores",
        "trainer_node/ledger_server/probes/probe_desk.py",
        "if len(mine) >= MAX_WAITING_OF_ONE:",
        "if False:",
        "tests/trainer_node/ledger_server/probes/test_probe_desk.py::test_scores_of_one_worker_take_few_places",
    ),
    Mutation(
        "takes batches",
        "trainer_node/ledger_server/callers.py",
        "if caller is None or caller.role != role:",
        "if caller is None:",
        "tests/daemons/rollouts/test_probes.py::test_worker_neither_sets_nor_reads_nor_judges_probes",
    ),
]
