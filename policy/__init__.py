"""The CrossGuard policy pack: what no stack may do, whoever wrote it; see `policy/rules.py` for the list.

    pulumi preview --policy-pack policy

It knows no other room: it judges what the program asks of AWS and Kubernetes, not how the program came to ask.
"""
