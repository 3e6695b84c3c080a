"""The parent of the trainer: everything of AWS, of money and of interruptions that a run needs on its node."""
