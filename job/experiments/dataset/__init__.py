"""Datasets: shards of tokens, with hashes, from text, from TinyStories or from a seed. Datasets are prepared on a
laptop and read by the trainer.
"""
