"""What a definition file says: read, checked, laid over by its rehearsal and scenarios."""
