"""Two nodes with addresses of their own, which are network namespaces of this machine; a pipeline spans them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.commands import assert_same, plain, program, results, run, torchrun

NODES = ("10.83.71.1", "10.83.71.2")
#: both ends of the cable are called so; a host's name leads Gloo to another address than the cable's
CARD = "card0"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[str]]:
    """Two namespaces and a cable between them; skips, with the reason, where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program `ip`, to make network namespaces")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = [f"lightning-pp-{os.getpid()}-{node}" for node in (0, 1)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", CARD, "netns", names[0], "type", "veth", "peer", "name", CARD, "netns", names[1])
            for name, address in zip(names, NODES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", CARD)
                ip("-n", name, "link", "set", CARD, "up")
                ip("-n", name, "link", "set", "lo", "up")
                ip("netns", "exec", name, "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def inside(name: str, command: list[str], variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    return ["ip", "netns", "exec", name, *command], {**variables, "GLOO_SOCKET_IFNAME": CARD}


def test_torchrun_with_one_stage_on_each_node(namespaces: list[str], tmp_path: Path) -> None:
    """The checkpoint, too, is gathered from node to node."""
    options = {
        "trainer": {"devices": 1, "num_nodes": 2, "enable_checkpointing": True},
        "strategy": {"stages": 2, "microbatches": 3}, "save": str(tmp_path / "last.ckpt"),
    }  # fmt: skip
    commands = []
    for node, name in enumerate(namespaces):
        launcher = torchrun(
            "--nnodes=2",
            f"--node-rank={node}",
            "--nproc-per-node=1",
            f"--master-addr={NODES[0]}",
            "--master-port=29400",
        )
        commands.append(inside(name, *program(options, *launcher)))
    found = results(run(*commands))
    assert [(one["rank"], one["node"], one["stage"]) for one in found] == [(0, 0, 0), (1, 1, 1)]
    expected = plain()
    assert_same(found, expected)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    sums = {name: tensor.sum().item() for name, tensor in saved.items()}
    assert sums == pytest.approx(expected["parameters"], rel=0, abs=1e-9)


def test_scripts_with_two_stages_and_two_replicas(namespaces: list[str]) -> None:
    """Started by hand on each node: the copies of a stage are neighbours, and a pipeline goes from node to node."""
    options = {
        "trainer": {"devices": 2, "num_nodes": 2}, "strategy": {"stages": 2, "microbatches": 3}, "replicas": 2,
    }  # fmt: skip
    commands = [
        inside(name, *program(options, NODE_RANK=node, MASTER_ADDR=NODES[0], MASTER_PORT=29401))
        for node, name in enumerate(namespaces)
    ]
    found = results(run(*commands))
    assert [(one["rank"], one["node"], one["stage"], one["replica"]) for one in found] == [
        (0, 0, 0, 0), (1, 0, 0, 1), (2, 1, 1, 0), (3, 1, 1, 1)
    ]  # fmt: skip
    assert found[0]["losses"] != found[1]["losses"]
    for pair in ((0, 1), (2, 3)):
        losses = zip(*(found[rank]["losses"] for rank in pair), strict=True)
        found[pair[0]]["losses"] = found[pair[1]]["losses"] = [sum(both) / 2 for both in losses]
    assert_same(found, plain(replicas=2))
