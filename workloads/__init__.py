"""What Kubernetes runs: the stages prepare, precompile and train as jobs that wait for one another, and what they need.

This room knows Kubernetes and the training settings. Who made the cluster it cannot know: it is handed a
`workloads.platform.Platform`.
"""
