"""The interpreter that has neuronx-distributed, for the tests marked `neuron`: the one that NXD_PYTHON names."""

from __future__ import annotations

import os

import pytest

NXD_PYTHON = os.environ.get("NXD_PYTHON", "")
NEEDS_NXD = pytest.mark.skipif(
    not NXD_PYTHON,
    reason="NXD_PYTHON is not set, expected a Python 3.11 or 3.12 with neuronx-distributed 0.17, torch-xla 2.9.0 and "
    "requirements-training.txt",
)
