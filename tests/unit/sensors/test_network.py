"""Network traffic of namespaces."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from stepscope.sensors import procfs
from stepscope.sensors.network import NetworkSensor

HEAD = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop ...
"""


def net_dev(**interfaces: tuple[int, int]) -> str:
    return HEAD + "".join(
        f"{name:>6}: {received} 29 0 0 0 0 0 0 {sent} 29 0 0 0 0 0 0\n"
        for name, (received, sent) in interfaces.items()
    )


def write(proc: Path, pid: int, text: str) -> None:
    (proc / f"{pid}/net").mkdir(parents=True, exist_ok=True)
    (proc / f"{pid}/net/dev").write_text(text)


def test_sums_all_interfaces_except_loopback(tmp_path: Path) -> None:
    write(tmp_path, 7, net_dev(lo=(50, 50), eth0=(1000, 10), ib0=(200, 2)))
    sensor = NetworkSensor(lambda: {4026531840: 7}, str(tmp_path))
    [reading] = sensor.read()
    assert reading.entity.name == "net:4026531840"
    assert reading.values == {"net_received": 1200, "net_sent": 12, "loopback": 50}


def test_totals_survive_removed_and_reset_interfaces(tmp_path: Path) -> None:
    sensor = NetworkSensor(lambda: {1: 7}, str(tmp_path))
    for traffic, expected in (
        ({"eth0": (1000, 10), "veth1": (500, 5)}, (1500, 15)),
        ({"eth0": (1100, 10)}, (1600, 15)),
        ({"eth0": (30, 1), "veth2": (70, 0)}, (1700, 16)),
    ):
        write(tmp_path, 7, net_dev(**traffic))
        [reading] = sensor.read()
        assert (reading.values["net_received"], reading.values["net_sent"]) == expected


def test_exited_process_is_replaced_by_another_of_its_namespace(tmp_path: Path) -> None:
    write(tmp_path, 7, net_dev(eth0=(1000, 10)))
    namespaces = {1: 7, 2: 8}
    sensor = NetworkSensor(lambda: namespaces, str(tmp_path))
    assert [reading.entity.name for reading in sensor.read()] == ["net:1"]
    assert sensor.missing == {}
    namespaces[1] = 9
    assert sensor.read() == []
    assert "No such file" in sensor.missing["net_sent"]
    write(tmp_path, 9, net_dev(eth0=(1500, 10)))
    [reading] = sensor.read()
    assert reading.values["net_received"] == 1500


def test_without_a_process_there_is_a_reason() -> None:
    sensor = NetworkSensor(dict)
    assert sensor.read() == []
    assert "no monitored process" in sensor.missing["loopback"]


def test_many_interfaces_exceed_a_page(tmp_path: Path) -> None:
    write(tmp_path, 7, net_dev(**{f"veth{index}": (1, 2) for index in range(500)}))
    [reading] = NetworkSensor(lambda: {1: 7}, str(tmp_path)).read()
    assert reading.values["net_sent"] == 1000


def test_unusual_interface_names() -> None:
    text = net_dev(**{"eth0:1": (5, 6), "wlan": (7, 8)}) + "broken line\n  short: 1 2\n"
    assert procfs.parse_interfaces(text.encode()) == {"eth0:1": (5, 6), "wlan": (7, 8)}
    assert procfs.parse_interfaces(b"") == {}


def test_real_loopback_traffic_is_counted() -> None:
    inode = os.stat("/proc/self/ns/net").st_ino
    sensor = NetworkSensor(lambda: {inode: os.getpid()})
    [before] = sensor.read()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(20):
                sender.sendto(b"x" * 10_000, receiver.getsockname())
    [after] = sensor.read()
    sent, had = after.values["loopback"], before.values["loopback"]
    assert sent is not None and had is not None
    assert sent - had >= 200_000
