"""AWS as the commands see it: the account, and what a stack has, does and leaves in it."""
