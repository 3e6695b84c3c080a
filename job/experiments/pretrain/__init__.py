"""pretrain-d64: trains a language model of characters from the beginning, and serves it."""
