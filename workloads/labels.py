"""The labels and names by which the parts of the workloads, and the Makefile's targets, find one another."""

from __future__ import annotations

PART_OF = {"app.kubernetes.io/part-of": "llama-trainium"}
"""On everything that workloads make, pods included."""

STAGE_LABEL = "llama-trainium/stage"
"""On a stage's job and pods: its name."""

DASHBOARD_LABEL = {"llama-trainium/dashboard": "stages"}
"""On the head of the cluster that runs a stage: the one Service finds it by this, whatever the cluster is called."""

DASHBOARD, TENSORBOARD, TOOLBOX = "dashboard", "tensorboard", "toolbox"
"""Names of Services and Deployments."""
DASHBOARD_PORT, TENSORBOARD_PORT = 8265, 6006

METRICS = "metrics"
"""Name of the port where Prometheus asks a pod of a stage how it is."""
RAY_METRICS_PORT, RUN_METRICS_PORT = 8080, 9400
"""That of Ray on each of its nodes, KubeRay's default, and that of a run under MPI (run.metrics_address)."""
METRICS_PORTS = (RAY_METRICS_PORT, RUN_METRICS_PORT)
