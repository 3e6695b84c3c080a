"""Datasets: turns text, TinyStories or a seed into hashed token shards. A laptop prepares them, and the trainer reads
them.
"""
