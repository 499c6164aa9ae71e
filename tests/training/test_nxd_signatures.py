"""Every call into neuronx-distributed and torch-xla is one that the pinned SDK takes, without having it installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from neuron_python import NEEDS_NXD, NXD_PYTHON
from nxd_calls import mistake, uses

HERE = Path(__file__).parent
RECORD = json.loads((HERE / "nxd_signatures.json").read_text())
TABLE = RECORD["signatures"]


def test_every_use_is_in_the_table_and_right() -> None:
    found = uses()
    assert len(found) > 30
    assert [line for use in found if (line := mistake(use, TABLE))] == []
    assert {use.name for use in found} == set(TABLE), "the table has what is not used: record it anew (nxd_calls.py)"


def of(text: str) -> list[str]:
    """Mistakes in a piece of source."""
    return [line for use in uses({"x.py": text}) if (line := mistake(use, TABLE))]


IMPORT = "from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear\n"
WRONG = [
    ("from neuronx_distributed.parallel_layers.layers import ColumnLinear", "is not in the table"),
    ("import neuronx_distributed as nxd\nnxd.save_checkpoints('a', 'b')", "save_checkpoints is not in the table"),
    (IMPORT + "ColumnParallelLinear(3, 4, sequence_paralel=True)", "has no parameter sequence_paralel"),
    (IMPORT + "ColumnParallelLinear(3)", "needs output_size"),
    (IMPORT + "import functools\nfunctools.partial(ColumnParallelLinear, biass=True)", "has no parameter biass"),
    (
        IMPORT + "class A(ColumnParallelLinear):\n def f(self):\n  super().__init__(1, size=2)",
        "no parameter size",
    ),
    ("import neuronx_distributed as nxd\nnxd.finalize_checkpoint(1)", "takes 0 arguments"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_use_is_found(text: str, message: str) -> None:
    assert any(message in line for line in of(text)), of(text)
    assert of(IMPORT + "ColumnParallelLinear(3, 4, bias=False)") == []


@pytest.mark.neuron
@NEEDS_NXD
def test_the_table_is_what_the_sources_say() -> None:
    environment = os.environ | {"NXD_CPU_MODE": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [NXD_PYTHON, str(HERE / "nxd_calls.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout[done.stdout.index("{") :]) == RECORD
