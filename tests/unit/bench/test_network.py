"""Where processes meet, from interfaces that are made up; and that this machine's are read."""

from mpisgd.bench.network import Interface, interfaces, meeting_place

LOOPBACK = Interface("lo", "127.0.0.1", "127.0.0.0/8")


def at(name, address, network):
    return Interface(name, address, network)


def test_this_host_has_a_loopback_interface():
    assert LOOPBACK in interfaces()


def test_one_host_meets_on_loopback():
    mine = [LOOPBACK, at("eth0", "10.0.0.1", "10.0.0.0/24")]
    assert meeting_place([mine, mine], num_nodes=1) == [LOOPBACK, LOOPBACK]


def test_hosts_meet_on_the_network_that_all_are_on():
    first = [LOOPBACK, at("docker0", "172.17.0.1", "172.17.0.0/16"), at("eth0", "10.0.0.1", "10.0.0.0/24")]
    second = [LOOPBACK, at("ib0", "10.0.0.2", "10.0.0.0/24")]
    place = meeting_place([first, second], num_nodes=2)
    assert [interface.name for interface in place] == ["eth0", "ib0"]


def test_hosts_without_a_network_in_common_cannot_meet():
    first, second = at("eth0", "10.0.0.1", "10.0.0.0/24"), at("eth0", "10.0.1.1", "10.0.1.0/24")
    assert meeting_place([[LOOPBACK, first], [LOOPBACK, second]], num_nodes=2) is None
