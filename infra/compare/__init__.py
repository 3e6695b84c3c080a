"""Other ways, places and prices for the same work."""
