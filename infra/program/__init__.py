"""The Pulumi program: decisions before the first resource, the resources, and a node's boot script."""
