"""Tables of figures for people and programs, each column written down once."""
