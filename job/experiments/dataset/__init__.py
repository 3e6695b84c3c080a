"""Datasets: text, TinyStories or a seed become hashed token shards. A laptop prepares them, the trainer reads them."""
