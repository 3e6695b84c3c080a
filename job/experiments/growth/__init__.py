"""tinystories-growth: a dense model grown into a mixture of experts."""
