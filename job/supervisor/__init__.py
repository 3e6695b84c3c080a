"""The parent process of the trainer: it handles AWS, money and interruptions for a run on this node."""
