"""The Pulumi program: the decisions that are made before the first resource, the resources, and a node's boot
script.
"""
