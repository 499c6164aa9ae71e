"""What a pull request is told: which stacks it touches, and for each what would change, what that costs, and which
rules of the policy pack it breaks.

    make preview-comment STACK=dev BASE=main

.github/workflows/preview.yml runs it and posts what it writes; docs/pull-requests.md has the setup.
"""
