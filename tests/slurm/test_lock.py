"""The questions of a run folder's lock, answered by a real Slurm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.run_folder import lock
from pipeline.run_folder.lock import LockOwner
from tests.slurm.cluster import Cluster


@pytest.mark.slurm
def test_slurm_says_whether_an_earlier_owner_is_gone(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.daemons.conf))
    lock._cluster_of_this_host.cache_clear()
    monkeypatch.setenv("SLURM_JOB_ID", "999999")
    by_hand = LockOwner.this_process()  # no job's process: its cluster is that of the commands here
    dead = replace(by_hand, cluster="scale-cpt-test", job="999998", restart=0, boot="another")
    assert dead.is_gone(by_hand), "Slurm knows no such job"
    assert not replace(dead, cluster="another").is_gone(by_hand)

    second = replace(by_hand, cluster="scale-cpt-test", restart=1)
    first = replace(second, restart=0, boot="another", node="n1")
    assert first.is_gone(second), "its node is at hand"
    assert not replace(first, node="n9").is_gone(second), "Slurm knows nothing of that node"
    lock._cluster_of_this_host.cache_clear()
