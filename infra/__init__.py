"""What AWS runs: network, cluster, accelerator nodes, storage, registry and image, add-ons, operators.

Each component is a `pulumi.ComponentResource` that takes its section of `infra.settings` and what others made,
and offers its outputs as attributes. `__main__.py` composes them.
"""
