"""Two doctors measure the path between them over loopback; other programs at either end do no harm."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.cli.machine_doctor import doctor
from p2pcast.doctor import path_measurements
from p2pcast.doctor.machine_facts import OUTCOMES, ROLES, PathFacts
from p2pcast.doctor.path_measurements import MAGIC, SEND, answer, measure_path
from p2pcast.doctor.remote_verdicts import judge_path
from p2pcast.ground.addresses import parse_address
from p2pcast.ground.errors import RetryableError


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(path_measurements, "RUN_S", 0.2)
    monkeypatch.setattr(path_measurements, "WAIT_S", 600.0)


@pytest.fixture
def answering():
    """A doctor that answers in a thread: (its address, future of the number of measurements)."""
    addresses, known = [], threading.Event()

    def opened(address):
        addresses.append(parse_address(address))
        known.set()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(answer, ("127.0.0.1", 0), 600.0, opened)
        assert known.wait(600)
        yield addresses[0], served


def test_both_directions_are_measured(answering):
    address, served = answering
    facts = measure_path(address)
    assert facts.fault == ""
    assert min(facts.there_bps, facts.back_bps) > 0
    assert 0 <= facts.there_loss <= 1
    assert 0 <= facts.back_loss <= 1
    assert served.result(600) == path_measurements.CONNECTIONS
    assert {each.outcome for each in judge_path(facts, ROLES)} <= {"ok", "warn"}


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", MAGIC + b"x", MAGIC[:-1], MAGIC + SEND])
def test_a_doctor_still_answers_after_another_program(answering, sent):
    address, served = answering
    with socket.create_connection(address) as sock:
        sock.sendall(sent)
    if sent == MAGIC + SEND:  # a complete measurement of no bytes
        measure_path(address)
    else:
        assert measure_path(address).fault == ""
    assert served.result(600) == path_measurements.CONNECTIONS


def test_an_address_without_a_doctor_is_told():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = sock.getsockname()
    facts = measure_path(address)
    assert (facts.rtt_s, facts.there_bps, facts.back_bps) == (None, None, None)
    (finding,) = judge_path(facts, ["peer"])
    assert (finding.check, finding.outcome) == ("path", "warn")
    assert "--answer" in finding.remedy


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.9\r\n", bytes(40)])
def test_a_program_that_answers_otherwise_gives_no_figures_of_the_way_back(said):
    def serve(server):
        for _ in range(3):
            sock, _ = server.accept()
            with sock:
                sock.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, server)
        facts = measure_path(server.getsockname())
        for _ in range(3):
            with socket.create_connection(server.getsockname()):
                pass
            if served.done():
                break
    assert facts.rtt_s is not None
    assert facts.fault
    assert facts.back_bps is None


def test_no_visitor_within_the_time_is_an_error():
    done = CliRunner().invoke(doctor, ["--answer", "127.0.0.1:0", "--answer-time", "1"])
    assert isinstance(done.exception, RetryableError)
    assert "p2pcast doctor --to" in done.output


FLOATS = st.none() | st.floats()


@given(st.builds(PathFacts, address=st.text(), fault=st.text(), rtt_s=FLOATS, there_bps=FLOATS, there_loss=FLOATS))
def test_every_finding_is_one_short_text_with_a_remedy(facts):
    for each in judge_path(facts, ROLES):
        assert each.outcome in OUTCOMES
        assert 0 < len(each.text.split()) <= 30
        assert "\n" not in each.text + each.remedy
        assert bool(each.remedy) == (each.outcome != "ok")
