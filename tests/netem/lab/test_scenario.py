"""Valid scenario files, and the errors for invalid ones."""

from __future__ import annotations

import pytest

from netem.emulation.description import Bursts, EmulatedLink, Host, Region
from netem.lab.case_network import experiment
from netem.lab.network_tables import NetworkEvent, events_of, network_of
from netem.lab.scenario import cases, parse
from netem.lab.scenario_run import backend_of, known, load
from p2pcast.ground.errors import UsageError

HEAD = """
what = "a thing"
minutes = 1
experiment = "links"
"""
NETWORK = """
[network]
congestion = "cubic"
[[regions]]
name = "east"
up = "10mbit"
down = "20mbit"
delay_ms = 40
bursts = { enter = 0.01, leave = 0.24 }
[[hosts]]
name = "hub"
[[hosts]]
name = "p"
count = 2
region = "east"
rate = "5mbit"
"""
EVENTS = """
[[events]]
version = 2
at_s = 0.5
do = "degrade"
host = "p2"
up = "1mbit"
[[events]]
do = "cut"
region = "east"
"""


def test_a_network_is_read() -> None:
    (case,) = cases(parse("s", HEAD + NETWORK + EVENTS))
    network = network_of(case.argument)
    five = EmulatedLink(5e6, 5e6)
    assert network.hosts == (Host("hub"), Host("p1", five, "east"), Host("p2", five, "east"))
    assert network.regions == (Region("east", EmulatedLink(10e6, 20e6, 0.04, loss=Bursts(0.01, 0.24))),)
    assert network.congestion == "cubic"
    assert events_of(case.argument) == [
        NetworkEvent(0.0, "cut", "east"),
        NetworkEvent(0.5, "degrade", "p2", 2, EmulatedLink(1e6, 5e6)),
    ]
    assert not case.only_rates


def _event(do: str, at_s: float, host: str = "p1") -> str:
    return f"[[events]]\ndo = '{do}'\nat_s = {at_s}\nversion = 1\nhost = '{host}'\n"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (_event("kill", 1, "hub"), r"events\[1\].do is 'kill': 'hub' is no peer"),
        (_event("stop", 1, "hub"), r"events\[1\].do is 'stop': 'hub' is no peer"),
        (_event("continue", 1, "hub"), r"events\[1\].do is 'continue': 'hub' is no peer"),
        (_event("join", 1, "hub"), r"events\[1\].do is 'join': 'hub' is no peer"),
        (_event("join", 1), r"events\[1\].do is 'join': the peer of p1 runs at that time"),
        (_event("join", 2) + _event("kill", 3), r"events\[1\].do is 'join': the peer of p1 runs"),
        (_event("kill", 1) + _event("join", 2) + _event("join", 3), r"events\[3\].do is 'join': the peer of p1 runs"),
        (_event("stop", 2) + _event("kill", 1), r"events\[1\].do is 'stop': the peer of p1 does not run"),
        (_event("stop", 1) + _event("join", 2), r"events\[2\].do is 'join': the peer of p1 stands still"),
        (_event("continue", 1), r"events\[1\].do is 'continue': the peer of p1 runs"),
        (
            _event("kill", 1) + "[parameters]\nabsent = ['p1']\n",
            r"events\[1\].do is 'kill': the peer of p1 does not run",
        ),
    ],
)
def test_impossible_process_events_are_refused(events: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse("s", HEAD + NETWORK + events)


def test_processes_end_stand_still_and_come_back() -> None:
    events = [("kill", 1), ("join", 2), ("stop", 3), ("continue", 4), ("stop", 5), ("kill", 6), ("join", 7)]
    words = (
        "".join(_event(do, at_s) for do, at_s in reversed(events)) + _event("cut", 8, "hub") + _event("join", 0, "p2")
    )
    (case,) = cases(parse("s", HEAD + NETWORK + words + "[parameters]\nabsent = ['p2']\n"))
    assert [event.do for event in events_of(case.argument)] == ["join", *(do for do, _ in events), "cut"]


def test_the_sweep_is_a_product_and_reaches_everything() -> None:
    sweep = """
[sweep]
rounds = [1, 2]
"hosts.p.delay_ms" = [0, 5]
"hosts.*.queue_ms" = [7]
"network.mtu" = [900]
"events.1.at_s" = [3]
"""
    every = list(cases(parse("s", HEAD + NETWORK + EVENTS + sweep)))
    assert [(case.number, case.keys["rounds"], case.keys["hosts.p.delay_ms"]) for case in every] == [
        (1, 1, 0), (2, 1, 5), (3, 2, 0), (4, 2, 5),
    ]  # fmt: skip
    last = network_of(every[3].argument)
    assert [host.link.delay_s for host in last.hosts] == [0, 0.005, 0.005]
    assert {host.link.queue_s for host in last.hosts} == {0.007}
    assert last.mtu == 900
    assert every[3].argument["parameters"] == {"rounds": 2}
    assert max(event.at_s for event in events_of(every[3].argument)) == 3


def test_setting_overrides_file_value() -> None:
    text = HEAD + NETWORK + "[parameters]\nrounds = 3\n[sweep]\nsize = [1, 2]\n"
    (case,) = cases(parse("s", text, {"size": 5, "regions.east.delay_ms": 1, "rounds": 4}))
    assert case.argument["parameters"] == {"rounds": 4, "size": 5}
    assert network_of(case.argument).regions[0].link.delay_s == 0.001
    assert len(list(cases(parse("s", text, {"rounds": [1, 2, 3]})))) == 6
    (case,) = cases(parse("s", HEAD + "[parameters]\nstripes = [1]\n", {"stripes": [1, 4]}))
    assert case.argument["parameters"] == {"stripes": [1, 4]}


def test_scenario_without_a_network() -> None:
    scenario = parse("s", HEAD)
    (case,) = cases(scenario)
    assert "network" not in case.argument
    assert backend_of(scenario) == "here"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "not TOML"),
        ("minutes = 1", "experiment is missing"),
        ("what = ''\nminutes = 1\nexperiment = 'links'", "what is empty"),
        (HEAD.replace("1", "'1'"), "minutes must be a number"),
        (HEAD.replace("1", "true"), "minutes must be a number"),
        (HEAD.replace("1", "0"), "minutes is 0"),
        (HEAD.replace("links", "../x"), "name of a module"),
        (HEAD + "colour = 1", "unknown key: colour"),
        (HEAD + "backend = 'cloud'", "backend is 'cloud'"),
        (HEAD + "[network]\nmtu = 1500", "hosts is missing"),
        (HEAD + NETWORK + "speed = 1", r"unknown key: network.hosts\[2\].speed"),
        (HEAD + NETWORK + "up = '1mbit'", "sets both directions"),
        (HEAD + NETWORK + "loss = 1.5", "must be a share"),
        (HEAD + NETWORK + "jitter_ms = 2", "jitter"),
        (HEAD + NETWORK + "[[hosts]]\nname = 'q'\nup = 'fast'", "'fast' is not a rate"),
        (HEAD + NETWORK + "[[hosts]]\nname = 'q:1'", "a name is up to"),
        (HEAD + NETWORK + "[[hosts]]\nname = 'east'", "same name, east"),
        (HEAD + NETWORK + "[[hosts]]\nname = 'q'\nregion = 'west'", "region 'west' that does not exist"),
        (HEAD + NETWORK + "[[hosts]]\nname = 'q'\ncount = 0", "count is 0"),
        (HEAD + NETWORK + "[[events]]\ndo = 'burn'\nhost = 'hub'", "do is 'burn'"),
        (HEAD + NETWORK + "[[events]]\ndo = 'kill'\nhost = 'q'", "no host 'q'"),
        (HEAD + NETWORK + "[[events]]\ndo = 'kill'\nregion = 'east'", "only the trunk of a region"),
        (HEAD + NETWORK + "[[events]]\ndo = 'kill'", "must name the target"),
        (HEAD + NETWORK + "[[events]]\ndo = 'degrade'\nhost = 'hub'", "no property of the link"),
        (HEAD + NETWORK + "[[events]]\ndo = 'cut'\nhost = 'hub'\nversion = 0", "version is 0"),
        (HEAD + "[[events]]\ndo = 'cut'\nhost = 'hub'", "there is no network"),
        (
            HEAD.replace("what", "hosts = [1]\nwhat") + "[sweep]\n'hosts.p.up' = ['1mbit']",
            r"hosts\[1\] must be a table",
        ),
        (HEAD + NETWORK + "[sweep]\n'network.hosts' = [1]", "write hosts.NAME.KEY"),
        (HEAD + NETWORK + "queue_ms = inf", "queue must be above 0"),
        (HEAD + NETWORK + "delay_ms = nan", "delay must be"),
        (HEAD + "[sweep]\na = []", "sweep.a must be a list of one or more"),
        (HEAD + "[sweep]\na = [1, 1]", "a value twice"),
        (HEAD + "[sweep]\n'hosts.p.up' = ['1mbit']", "there is no network"),
        (HEAD + NETWORK + "[sweep]\n'hosts.q.up' = ['1mbit']", "no host 'q'"),
        (HEAD + f"[sweep]\na = {list(range(501))}", "501 cases"),
        (HEAD + "[[plots]]\nx = 'a'\ny = 'b'\nfile = 'a/b'\ntitle = 't'", "part of a file name"),
        (HEAD + "[[reference]]\na = 1", "a source"),
        (HEAD + "[[holds]]\nwhat = 'w'\nkey = 'k'", "must give the bound"),
    ],
)
def test_invalid_scenario_is_a_one_line_error(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        parse("s", text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", known())
def test_included_scenarios_are_valid(name: str) -> None:
    scenario = load(name)
    assert callable(experiment(scenario.experiment))
    assert scenario.columns
    assert scenario.holds
    for case in cases(scenario):
        if "network" in case.argument:
            network_of(case.argument)


def test_unknown_scenario_is_refused() -> None:
    with pytest.raises(UsageError, match="lab list"):
        load("none")
    with pytest.raises(UsageError, match=r"cannot read scenario none.toml"):
        load("none.toml")
    with pytest.raises(UsageError, match="no experiment 'none'"):
        experiment("none")
