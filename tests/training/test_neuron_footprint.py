"""The plan's activations against what autograd keeps under neuronx-distributed, tensor parallel 2."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from neuron_python import NEEDS_NXD, NXD_PYTHON

ROOT = Path(__file__).parents[2]


@pytest.mark.neuron
@NEEDS_NXD
def test_activations_are_what_autograd_keeps_under_nxd(tmp_path: Path) -> None:
    """Within 2 %, with and without the sequence split; the joined weights are in it."""
    environment = os.environ | {"NXD_CPU_MODE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [NXD_PYTHON, str(ROOT / "tests/training/nxd_saved_bytes.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    found = json.loads(line)
    assert len(found) == 3
    for name, measured, planned in found:
        assert planned == pytest.approx(measured, rel=0.02), name
