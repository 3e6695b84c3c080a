"""Datasets: text, TinyStories or a seed into hashed token shards. Used on the laptop and read by the trainer."""
