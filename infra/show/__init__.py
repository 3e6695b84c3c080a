"""Tables for people and programs, with each column defined once."""
