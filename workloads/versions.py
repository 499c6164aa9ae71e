"""Every version that workloads name."""

from __future__ import annotations

RAY = "2.60.0"
"""Ray of the training image (requirements-training.txt): KubeRay decides by it what it may ask of Ray."""
