"""pretrain-d64: a language model of characters from nothing, and a server for this model."""
