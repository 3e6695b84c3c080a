"""Datasets: shards of tokens, with hashes, from text, from TinyStories or from a seed. They are prepared on a laptop,
and the trainer reads them.
"""
