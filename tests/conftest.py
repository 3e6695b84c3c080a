"""What holds for every test."""

import signal

# A shell starts what it puts in the background with Ctrl-C ignored, and every process started from there inherits it.
# The tests press Ctrl-C themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)
