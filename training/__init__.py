"""Pre-train Llama: the code that runs on the accelerators, and on one machine with `make run`.

`python -m training --help` lists the stages. Nothing in this package imports Pulumi, `infra` or `workloads`.
"""
