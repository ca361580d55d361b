"""Two hosts on one machine: the commands they run, why not, and the whole of it where namespaces are permitted."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest

from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from tools import multihost
from tools.multihost import Hosts


def test_hosts_run_the_same_command_but_for_their_number(tmp_path: Path) -> None:
    options = Namespace(checkpoint=tmp_path, ranks_per_host=2)
    first, second = multihost.commands_of("a transport", options, ("--tokens", "16"))
    assert first[0] == sys.executable and first[-4:] == ["run", str(tmp_path), "--tokens", "16"]
    differing = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
    assert differing == [("0", "1")]
    assert first[first.index("--master-addr") + 1] == multihost.ADDRESSES[0]


def test_a_machine_without_the_command_states_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(multihost.shutil, "which", lambda name: None)
    assert multihost.main(["--checkpoint", str(tmp_path)]) == 0
    stated = capsys.readouterr().out
    assert stated.startswith("skipped   two hosts on one machine: the command ip is missing")
    assert "apt install iproute2" in stated


def test_what_the_machine_states_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=subprocess.CalledProcessError(1, ["ip"], stderr="Operation not permitted\n"))
    monkeypatch.setattr(multihost.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(multihost, "ip", refuse)
    assert multihost.reason_against(inside=False) == "Operation not permitted"


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_layer_runs_over_two_hosts_and_a_cut_cable_ends_it_on_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := multihost.reason_against(inside=False):
        pytest.skip(f"this machine permits no network namespaces: {reason}")
    shape = CheckpointShape(num_experts=32, hidden_size=256, intermediate_size=128)
    write_checkpoint(tmp_path / "ds3", shape)
    assert multihost.main(["--checkpoint", str(tmp_path / "ds3")]) == 0, capsys.readouterr().out
    stated = capsys.readouterr().out
    assert [stated.count(f"ok        {name} over two hosts") for name in multihost.TRANSPORTS] == [1, 1, 1, 1]
    assert [stated.count(f"ok        {name}: both hosts named the lost peer") for name in multihost.CUT] == [1, 1]
    with Hosts() as hosts:
        assert hosts.sent_bytes() < multihost.FLOWING_BYTES
